"""All messages of an episode, each with its message id, and the ids of deleted messages.

Messages are never changed and ids never reused; deleting only adds to ``deleted``. In prompts a deleted message is
replaced by a stub.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.types import Message

MSG_ID = "msg_id"
INVOKED_BY = "msg_id(invoking_assistant)"
DELETED = "deleted"

_MARKER = re.compile(r"[<\[][^\s\"\\]+[>\]]")
"""The form of a special token, as ``<|im_end|>`` or ``[INST]``. Added tokens of another form are not broken up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """A tool's answer: a text or JSON. ``answer`` is set by the call that ends the episode."""

    message: Any
    ok: bool = True
    answer: str | None = None

    @property
    def status(self) -> str:
        """``success`` or ``error``, as results show it."""
        return "success" if self.ok else "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """A planned ``deleteContext``: the ids to delete, and the reasons for refused ids."""

    deleted: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)

    def result(self) -> ToolResult:
        """Returns the tool's answer; it is an error if nothing is deleted."""
        result: dict[str, Any] = {"deleted_msg_ids": list(self.deleted)}
        if self.refused:
            result["not_deleted"] = {str(msg_id): reason for msg_id, reason in self.refused.items()}
        return ToolResult(message=result, ok=bool(self.deleted))


class History:
    """The messages of one episode. Those of the prompt, system message and question, cannot be deleted.

    ``break_markers`` is applied to every tool result and tool name, so that no text becomes a special token.
    """

    def __init__(
        self,
        prompt: Iterable[Message],
        break_markers: Callable[[str], str] | None = None,
        *,
        ids_from_first_turn: bool = False,
    ) -> None:
        """``ids_from_first_turn`` gives the first sampled turn the id 0; prompt messages then have negative ids."""
        first_messages = list(prompt)
        self.messages: list[Message] = []
        self.deleted: set[int] = set()
        self._break_markers = break_markers or (lambda text: text)
        self._first_id = -len(first_messages) if ids_from_first_turn else 0
        for message in first_messages:
            self._append(dict(message))
        self._prompt_end = self._next_id()

    def add_assistant(self, text: str) -> int:
        """Adds a sampled turn; returns its id."""
        return self._append({"role": "assistant", "content": text})

    def add_result(self, tool_name: str, result: ToolResult, *, invoked_by: int) -> int:
        """Adds a tool's answer in the form of prompts; returns its id."""
        msg_id = self._next_id()
        result_fields = {MSG_ID: msg_id, INVOKED_BY: invoked_by, "status": result.status, "message": result.message}
        content = self._break_markers(json.dumps(result_fields, ensure_ascii=False))
        name = self._break_markers(tool_name)
        return self._append({"role": "tool", "content": content, "tool_name": name, INVOKED_BY: invoked_by})

    def plan_deletion(self, ids: Sequence[int], *, invoked_by: int) -> Deletion:
        """Returns the plan of a deletion of ``ids``; nothing is deleted yet."""
        refused = {msg_id: reason for msg_id in ids if (reason := self._refusal(msg_id, invoked_by))}
        return Deletion(deleted=tuple(msg_id for msg_id in ids if msg_id not in refused), refused=refused)

    def delete(self, deletion: Deletion) -> None:
        self.deleted.update(deletion.deleted)

    def results_of_last_turn(self) -> list[Message]:
        """Returns the tool results that came after the last sampled turn, the newest first."""
        return list(itertools.takewhile(lambda message: message["role"] == "tool", reversed(self.messages)))

    def is_undeleted_turn(self, message: Message) -> bool:
        """Returns True for a sampled turn that was not deleted."""
        return message["role"] == "assistant" and message[MSG_ID] >= self._prompt_end and not self.is_deleted(message)

    def is_deleted(self, message: Message) -> bool:
        return message[MSG_ID] in self.deleted

    def _append(self, message: Message) -> int:
        msg_id = self._next_id()
        self.messages.append({**message, MSG_ID: msg_id})
        return msg_id

    def _next_id(self) -> int:
        return self._first_id + len(self.messages)

    def _refusal(self, msg_id: int, invoked_by: int) -> str | None:
        """Returns why the message cannot be deleted; None if it can."""
        if not self._first_id <= msg_id < self._next_id():
            return "there is no message with this id"
        if msg_id < self._prompt_end:
            return "it belongs to the task and cannot be deleted"
        if msg_id == invoked_by:
            return "it is the message that makes this call; it can be deleted in a later turn"
        if msg_id > invoked_by:
            return "it answers this very turn and was not shown yet; it can be deleted in a later turn"
        return "it is deleted already" if msg_id in self.deleted else None


def stub_of(message: Message) -> Message:
    """Returns the stub that replaces a deleted message in prompts."""
    msg_id = message[MSG_ID]
    if message["role"] != "tool":
        return {"role": message["role"], "content": f"[message {msg_id} was deleted]"}
    result_fields = {MSG_ID: msg_id, INVOKED_BY: message[INVOKED_BY], "status": DELETED}
    return {"role": "tool", "content": json.dumps(result_fields)}


class MarkerBreaker:
    """Inserts a space into the special tokens in a text, as in ``< |im_end|>``."""

    def __init__(self, markers: Iterable[str]) -> None:
        # The longest first, because the first alternative that matches is taken.
        breakable = sorted((marker for marker in markers if _MARKER.fullmatch(marker)), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, breakable))) if breakable else None

    def __call__(self, text: str) -> str:
        """Returns the text with every special token broken up."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: f"{match.group()[0]} {match.group()[1:]}", text)
