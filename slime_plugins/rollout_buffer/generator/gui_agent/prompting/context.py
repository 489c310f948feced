"""How an episode becomes prompts: the one thing in which rollout modes differ.

``Context`` is the seam. ``IncrementalContext`` lets one token sequence grow; ``HistoryContext`` writes a new prompt for
every turn. The episode loop, its record, budgets, actions and rewards know nothing of which one is at work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import MOBILE_USE_TOOL
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import PromptObservation, system_message
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import ParsedReply
from slime_plugins.rollout_buffer.generator.gui_agent.settings import ObservationMode
from slime_plugins.rollout_buffer.types import Image, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a task tells its agents of tool and screen: the tool's description, and what prompts show of the screen."""

    tool: Mapping[str, Any] = field(default_factory=lambda: MOBILE_USE_TOOL)
    observation_mode: ObservationMode = ObservationMode.SCREENSHOT

    def system(self) -> Message:
        """Returns the message every episode begins with."""
        return system_message(self.tool)

    def observation(self, seen: Observation) -> PromptObservation:
        """Returns what a prompt shows of ``seen``."""
        return PromptObservation(
            screenshot=seen.screenshot.sha256 if self.observation_mode is not ObservationMode.ELEMENTS else None,
            elements=seen.elements if self.observation_mode is not ObservationMode.SCREENSHOT else "",
        )

    def images(self, seen: Observation) -> tuple[Image, ...]:
        """Returns the images that stand in a prompt with that observation."""
        return () if self.observation_mode is ObservationMode.ELEMENTS else (seen.screenshot,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What the engine is asked to go on from: ``ids`` hold one placeholder per entry of ``images``, in order."""

    ids: Sequence[int]
    images: Sequence[Image]


@dataclass(frozen=True, kw_only=True, slots=True)
class LastTurn:
    """The turn that was just played: its number from 1, what was sampled, and what it was read as."""

    number: int
    max_turns: int
    output_ids: Sequence[int]
    reply: ParsedReply


class Context(Protocol):
    """Writes the prompts of one episode, in order. Made for a single episode."""

    def begin(self, seen: Observation) -> tuple[Sequence[Message], Prompt]:
        """Returns the messages that the episode's record begins with, and the prompt of turn 1."""
        ...

    def go_on(self, last: LastTurn, seen: Observation) -> tuple[Message, Prompt]:
        """Returns the message that shows ``seen`` in the record, and the whole prompt of the turn after ``last``."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Returns what a reader of the record needs beside its messages to know what each turn saw."""
        ...
