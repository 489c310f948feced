"""Renders prompts that only grow: the previous prompt, its sampled ids, and a bridge with the next screenshot.

Sampled ids are never tokenised again, so the whole episode is one training row. Every request has all screenshots so
far: SGLang needs as many images as the ids have placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import LastTurn, Prompt, View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    first_turn_message,
    later_turn_message,
)
from slime_plugins.rollout_buffer.generator.shared_prefix import SharedPrefix
from slime_plugins.rollout_buffer.types import Image, Message


class IncrementalContext:
    """A ``Context`` of one sequence. Every prompt begins with the previous prompt and its reply."""

    def __init__(self, chat: ChatTokens, view: View) -> None:
        self._chat = chat
        self._view = view
        self._ids: list[int] = []
        self._images: list[Image] = []

    def begin(self, seen: Observation) -> tuple[Sequence[Message], Prompt]:
        """As ``Context.begin``: the task, the instructions, the first screenshot."""
        messages = [self._view.system(), first_turn_message(seen.goal, self._view.observation(seen))]
        self._ids += self._chat.prompt(messages)
        return messages, self._prompt(seen)

    def go_on(self, last: LastTurn, seen: Observation) -> tuple[Message, Prompt]:
        """As ``Context.go_on``: a note, a step counter, the screenshot."""
        message = later_turn_message(last.number + 1, last.max_turns, self._view.observation(seen), seen.note)
        self._ids += last.output_ids
        self._ids += self._chat.bridge(message, turn_is_closed=self._chat.is_closed(last.output_ids))
        return message, self._prompt(seen)

    def facts(self) -> Mapping[str, Any]:
        """As ``Context.facts``: empty, because each turn has all earlier messages in its prompt."""
        return {}

    def _prompt(self, seen: Observation) -> Prompt:
        self._images += self._view.images(seen)
        return Prompt(ids=SharedPrefix(self._ids, len(self._ids)), images=tuple(self._images))
