"""The ``Context`` protocol: renders the prompts of an episode. Rollout modes differ only in their ``Context``.

``IncrementalContext`` grows one token sequence; ``HistoryContext`` (``history_context.py``) renders a new prompt for
every turn. The episode loop, its record, budgets, actions and rewards are the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import MOBILE_USE_TOOL
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    PromptObservation,
    first_turn_message,
    later_turn_message,
    system_message,
)
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import ParsedReply
from slime_plugins.rollout_buffer.generator.gui_agent.settings import ObservationMode
from slime_plugins.rollout_buffer.generator.shared_prefix import SharedPrefix
from slime_plugins.rollout_buffer.types import Image, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The tool description of a task type, and the parts of an observation in its prompts."""

    tool: Mapping[str, Any] = field(default_factory=lambda: MOBILE_USE_TOOL)
    observation_mode: ObservationMode = ObservationMode.SCREENSHOT

    def system(self) -> Message:
        """Returns the system message of every episode."""
        return system_message(self.tool)

    def parts(self, observation: Observation) -> PromptObservation:
        """Returns the parts of an observation in a prompt."""
        return PromptObservation(
            screenshot=None if self.observation_mode is ObservationMode.ELEMENTS else observation.screenshot.sha256,
            elements="" if self.observation_mode is ObservationMode.SCREENSHOT else observation.elements,
        )

    def images(self, observation: Observation) -> tuple[Image, ...]:
        """Returns the images of an observation in a prompt."""
        return () if self.observation_mode is ObservationMode.ELEMENTS else (observation.screenshot,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The input of a turn: ``ids`` hold one placeholder per entry of ``images``, in order."""

    ids: Sequence[int]
    images: Sequence[Image]


@dataclass(frozen=True, kw_only=True, slots=True)
class LastTurn:
    """The turn that was just played: its number from 1, its sampled ids, and the parsed reply."""

    number: int
    max_turns: int
    output_ids: Sequence[int]
    reply: ParsedReply


class Context(Protocol):
    """Renders the prompts of one episode, in order."""

    def begin(self, observation: Observation) -> tuple[Sequence[Message], Prompt]:
        """Returns the first messages of the record, and the prompt of turn 1."""
        ...

    def go_on(self, last: LastTurn, observation: Observation) -> tuple[Message, Prompt]:
        """Returns the message with the observation for the record, and the whole prompt of the turn after ``last``."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Returns what is needed besides the messages to reconstruct the prompt of each turn."""
        ...


class IncrementalContext:
    """A ``Context`` of one sequence: the previous prompt, its sampled ids, and a bridge with the next screenshot.

    Sampled ids are never tokenised again, so the whole episode is one training row. Every request has all screenshots
    so far: SGLang needs as many images as the ids have placeholders.
    """

    def __init__(self, chat: ChatTokens, view: View) -> None:
        self._chat = chat
        self._view = view
        self._ids: list[int] = []
        self._images: list[Image] = []

    def begin(self, observation: Observation) -> tuple[Sequence[Message], Prompt]:
        """As ``Context.begin``: the task, the instructions, the first screenshot."""
        messages = [self._view.system(), first_turn_message(observation.goal, self._view.parts(observation))]
        self._ids += self._chat.prompt(messages)
        return messages, self._prompt(observation)

    def go_on(self, last: LastTurn, observation: Observation) -> tuple[Message, Prompt]:
        """As ``Context.go_on``: a note, a step counter, the screenshot."""
        message = later_turn_message(last.number + 1, last.max_turns, self._view.parts(observation), observation.note)
        self._ids += last.output_ids
        self._ids += self._chat.bridge(message, turn_is_closed=self._chat.is_closed(last.output_ids))
        return message, self._prompt(observation)

    def facts(self) -> Mapping[str, Any]:
        """As ``Context.facts``: empty, because each turn has all earlier messages in its prompt."""
        return {}

    def _prompt(self, observation: Observation) -> Prompt:
        self._images += self._view.images(observation)
        return Prompt(ids=SharedPrefix(self._ids, len(self._ids)), images=tuple(self._images))
