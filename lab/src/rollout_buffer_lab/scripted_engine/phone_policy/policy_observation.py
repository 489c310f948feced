"""What the policy knows in a turn: what the screen shows, and its conclusions of earlier turns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Point
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from rollout_buffer_lab.simulated_phone.screen_records import ReadScreen, TextLine, TextRole

_GOAL: Final = re.compile(
    r"The user query:\s*(.*?)\s*(?:\n\s*\n(?=First\b|Before\b|Task progress|Think\b)|\Z)", re.DOTALL
)
_CONCLUSION: Final = re.compile(r"<conclusion>\s*+(.{0,4000}?)\s*</conclusion>", re.DOTALL)
_PROGRESS: Final = re.compile(r"\n[^\S\n]*\nTask progress[^:]*:\s*(.*?)(?:\n\s*\n|\Z)", re.DOTALL)
_DONE_STEP: Final = re.compile(r"Step \d+:\s*(.*?)\s*(?=(?:;\s*|\n)Step \d+:|\Z)", re.DOTALL)
_STEP: Final = re.compile(r"Step (\d+)(?: of \d+)?:\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One entry of a list: its main line, and in ``detail`` the small line below it, empty if there is none."""

    text: str
    detail: str
    center: Point
    selected: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObservation:
    """The present screen, and the conclusions of earlier turns, oldest first."""

    screen: ReadScreen
    history: tuple[str, ...]

    def did(self, sentence: str) -> bool:
        """Returns True if an earlier conclusion began with ``sentence``."""
        return any(conclusion.startswith(sentence) for conclusion in self.history)

    def recalled(self, pattern: str) -> str | None:
        """Returns the first group of ``pattern`` in the latest conclusion that it matches; None without a match."""
        matches = (re.match(pattern, conclusion, re.DOTALL) for conclusion in reversed(self.history))
        return next((match.group(1) for match in matches if match), None)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The entries of the list on the screen, without headings and without lines inside fields."""
        return tuple(_rows(self.screen))


def read_observation(conversation: Conversation) -> PolicyObservation:
    """Returns what the policy knows in this turn.

    Raises:
        ValueError: there is no screenshot, or it cannot be read.
    """
    screenshot = conversation.last_image
    if screenshot is None:
        raise ValueError("the conversation shows no screenshot")
    return PolicyObservation(screen=_read(screenshot), history=read_history(conversation))


def read_goal(conversation: Conversation) -> str | None:
    """Returns the goal of the task; None if the conversation is about something else."""
    for turn in conversation.user_turns:
        match = _GOAL.search(turn.text)
        if match:
            return match.group(1)
    return None


def read_history(conversation: Conversation) -> tuple[str, ...]:
    """Returns the conclusions so far, from the replies, or from the list of steps that a rebuilt prompt has instead."""
    concluded = [_CONCLUSION.search(reply) for reply in conversation.replies]
    progress = _PROGRESS.search(conversation.user_turns[0].text) if conversation.user_turns else None
    listed = _DONE_STEP.findall(progress.group(1)) if progress else []
    conclusions = [match.group(1) if match else "" for match in concluded]
    return tuple(conclusion.strip("\"' ") for conclusion in [*listed, *conclusions])


def step_number(conversation: Conversation) -> int:
    """Returns the number of this turn in the episode, from 1."""
    last = conversation.user_turns[-1].text if conversation.user_turns else ""
    numbered = _STEP.search(last)
    return int(numbered.group(1)) if numbered else len(read_history(conversation)) + 1


@lru_cache(maxsize=256)
def _read(screenshot: bytes) -> ReadScreen:
    """Reads a screenshot once: the members of a group see the same first screens."""
    return read_screen(screenshot)


def _rows(screen: ReadScreen) -> Iterator[Row]:
    lines = [line for line in screen.texts if line.role in (TextRole.PRIMARY, TextRole.SECONDARY)]
    for index, line in enumerate(lines):
        if line.role is not TextRole.PRIMARY:
            continue
        below = lines[index + 1] if index + 1 < len(lines) else None
        detail = below.text if below is not None and below.role is TextRole.SECONDARY and _is_below(line, below) else ""
        yield Row(text=line.text, detail=detail, center=line.center, selected=line.selected)


def _is_below(line: TextLine, below: TextLine) -> bool:
    """Returns True if a small line belongs to the main line: it starts at the same column, right under it."""
    return abs(line.bounds.left - below.bounds.left) < 12 and below.bounds.top - line.bounds.bottom < 60
