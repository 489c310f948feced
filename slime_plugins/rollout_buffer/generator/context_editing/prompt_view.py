"""Renders a history as prompt ids: undeleted turns as sampled, everything else by the template.

A prompt alternates sampled turns, with exactly their sampled ids, and *runs*: the messages between two such turns (tool
results, stubs of deleted messages), rendered by the template together:

    prompt run │ sampled turn │ run of results and stubs │ sampled turn │ run │ …

So sampled ids are never tokenised again. After a deletion only the runs that it changes are rendered again, and every
id before the first changed run stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.generator.context_editing.history import MSG_ID, History, stub_of
from slime_plugins.rollout_buffer.generator.shared_prefix import SharedPrefix
from slime_plugins.rollout_buffer.types import Message

_RunKey = tuple[int | None, tuple[tuple[int, bool], ...]]
"""What a run's ids depend on: the id of the sampled turn before it, and each message's id and whether it is deleted."""


class PromptView:
    """Renders the prompts of one episode. The template writes ``tools`` into the first run."""

    def __init__(self, chat: ChatTokens, tools: Sequence[Mapping[str, Any]]) -> None:
        self._chat = chat
        self._tools = tools
        self._sampled: dict[int, Sequence[int]] = {}
        self._runs: dict[_RunKey, list[int]] = {}
        self._ids: list[int] = []

    def add_turn(self, msg_id: int, output_ids: Sequence[int]) -> None:
        """Stores the sampled ids of message ``msg_id``."""
        self._sampled[msg_id] = output_ids

    def prompt(self, history: History) -> SharedPrefix:
        """Returns the ids of the next prompt. A prompt that continues the last one shares its list.

        Raises:
            ConfigError: the chat template refuses the messages.
        """
        ids = self._render(history)
        if ids[: len(self._ids)] == self._ids:
            self._ids += ids[len(self._ids) :]
        else:
            self._ids = ids
        return SharedPrefix(self._ids, len(self._ids))

    def _render(self, history: History) -> list[int]:
        ids: list[int] = []
        last_turn: int | None = None
        run: list[Message] = []
        for message in history.messages:
            if not history.is_undeleted_turn(message):
                run.append(message)
                continue
            ids += self._run(last_turn, run, history)
            ids += self._sampled[message[MSG_ID]]
            last_turn, run = message[MSG_ID], []
        return [*ids, *self._run(last_turn, run, history)]

    def _run(self, last_turn: int | None, messages: Sequence[Message], history: History) -> list[int]:
        """Returns the ids between two sampled turns, generation prompt included."""
        key = (last_turn, tuple((message[MSG_ID], history.is_deleted(message)) for message in messages))
        if key not in self._runs:
            visible = [stub_of(message) if history.is_deleted(message) else message for message in messages]
            self._runs[key] = self._tokenised(last_turn, [_for_template(message) for message in visible])
        return self._runs[key]

    def _tokenised(self, last_turn: int | None, messages: Sequence[Message]) -> list[int]:
        if last_turn is None:
            return self._chat.prompt(messages, self._tools)
        is_closed = self._chat.is_closed(self._sampled[last_turn])
        return self._chat.bridge_over(messages, turn_is_closed=is_closed)


def _for_template(message: Message) -> Message:
    """Returns a message without keys that templates of some models refuse."""
    name = {"name": message["tool_name"]} if message.get("tool_name") else {}
    return {"role": message["role"], "content": message["content"], **name}
