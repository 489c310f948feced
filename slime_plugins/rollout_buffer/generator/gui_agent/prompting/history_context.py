"""Renders a new prompt for every turn: the task, one line per earlier step, the present screenshot.

Each turn is a training row. The agent's conclusion of a turn becomes a line ``Step k: …`` in all later prompts, which
may also repeat the last few screenshots. The record of the episode stays one conversation with every line and
screenshot once: ``messages_of_turn`` rebuilds the messages of any turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import LastTurn, Prompt, View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    history_turn_message,
    repeated_screenshot,
    with_history,
)
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import MalformedAction, ParsedAction, ParsedReply
from slime_plugins.rollout_buffer.types import Image, Message

NOTHING_WAS_DONE = "Nothing was done, because the reply was not a valid action."
_QUOTED_CHARACTERS = 80


class HistoryContext:
    """A ``Context`` of independent prompts, each with at most ``history_images`` screenshots."""

    def __init__(self, chat: ChatTokens, view: View, *, history_images: int) -> None:
        self._chat = chat
        self._view = view
        self._history_images = history_images
        self._goal = ""
        self._turns = 0
        self._lines: list[str] = []
        self._screenshots: list[Image] = []

    def begin(self, observation: Observation) -> tuple[Sequence[Message], Prompt]:
        """As ``Context.begin``: the task, the instructions, ``Step 1`` and the first screenshot."""
        self._goal = observation.goal
        messages, _, prompt = self._next_prompt(observation)
        return messages, prompt

    def go_on(self, last: LastTurn, observation: Observation) -> tuple[Message, Prompt]:
        """As ``Context.go_on``; the message holds only the new observation, without the task and the earlier steps."""
        self._lines.append(step_line(last.reply))
        _, message, prompt = self._next_prompt(observation)
        return message, prompt

    def facts(self) -> Mapping[str, Any]:
        """As ``Context.facts``: the lines of the progress so far, and the number of screenshots in a prompt."""
        return {"history": list(self._lines), "history_images": self._history_images}

    def _next_prompt(self, observation: Observation) -> tuple[list[Message], Message, Prompt]:
        """Returns the messages of the whole prompt, its new message, and the prompt itself."""
        self._turns += 1
        self._screenshots += self._view.images(observation)
        message = history_turn_message(self._turns, self._view.parts(observation), observation.note)
        hashes = [image.sha256 for image in self._screenshots]
        prompt = _user_message(self._goal, self._lines, hashes, message, self._history_images)
        messages = [self._view.system(), prompt]
        images = tuple(self._screenshots[-self._history_images :])
        return messages, message, Prompt(ids=tuple(self._chat.prompt(messages)), images=images)


def messages_of_turn(messages: Sequence[Message], extra_info: Mapping[str, Any], turn: int) -> list[Message]:
    """Returns the messages before turn ``turn`` (from 1) of a stored history trajectory.

    Raises:
        IndexError: the trajectory has no such turn.
    """
    observations = [message for message in messages if message["role"] == "user"]
    if not 1 <= turn <= len(observations):
        raise IndexError(f"the trajectory has {len(observations)} turns; there is no turn {turn}")
    if turn == 1:
        return list(messages[:2])
    hashes = [screenshot for message in observations[:turn] for screenshot in _screenshots(message)[-1:]]
    lines = extra_info["history"][: turn - 1]
    prompt = _user_message(extra_info["goal"], lines, hashes, observations[turn - 1], extra_info["history_images"])
    return [messages[0], prompt]


def step_line(reply: ParsedReply) -> str:
    """Returns the line of a turn for later prompts: its conclusion, else its action in words.

    For a malformed reply the line states that nothing was done.
    """
    if isinstance(reply.action, MalformedAction):
        return NOTHING_WAS_DONE
    return " ".join(reply.conclusion.split()) or _in_words(reply.action)


def _user_message(
    goal: str, lines: Sequence[str], screenshots: Sequence[str], message: Message, history_images: int
) -> Message:
    """Returns the whole user message; ``screenshots`` are the hashes of all steps, the present one last."""
    current_step = len(screenshots)
    first = max(1, current_step - history_images + 1)
    earlier = [repeated_screenshot(step, screenshots[step - 1]) for step in range(first, current_step)]
    return with_history(goal, lines, earlier, message)


def _screenshots(message: Message) -> list[str]:
    """Returns the hashes of the screenshots in a user message, the new one last."""
    urls = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    return [str(url).removeprefix("sha256:") for url in urls]


def _in_words(parsed: ParsedAction) -> str:
    """Formats an action: ``click [500, 300]``, ``type "Anna"``, ``system_button Back``."""
    action = parsed.action
    points = (parsed.coordinate, parsed.coordinate2)
    facts = [f"[{point[0]:g}, {point[1]:g}]" for point in points if point is not None]
    if action.text is not None:
        facts.append(json.dumps(" ".join(action.text.split())[:_QUOTED_CHARACTERS], ensure_ascii=False))
    facts += [str(fact) for fact in (action.button, action.status) if fact is not None]
    return " ".join([str(action.kind), *facts])
