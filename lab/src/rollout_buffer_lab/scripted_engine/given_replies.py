"""Replies from a file, instead of the scripted policies: ``rollout-buffer engine --script FILE``.

A line of the file is one conversation: a list of replies, one for each turn, or a single reply. A reply is a text, or
an assistant's message with ``content`` and ``tool_calls``, which are written in Hermes' format. New conversations take
the lines in turn; a later turn takes its reply from a line that begins with the conversation's earlier replies.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError
from slime_plugins.rollout_buffer.errors import ConfigError

Line = Sequence[str]
DELETED = re.compile(r"\[message \d+ was deleted\]")
"""The text that the generator ``statelm`` puts in place of a reply that the policy deleted."""


class GivenReplies:
    """A policy that returns the file's replies."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._taken_counts: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def __call__(self, conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
        """Returns the next reply of a line that begins with the replies so far; several such lines take turns.

        Raises:
            BadRequestError: no line goes on from these replies.
        """
        replies = tuple(conversation.replies)
        fitting = [
            line[len(replies)]
            for line in self._lines
            if len(line) > len(replies)
            and all(reply == given or DELETED.fullmatch(reply) for reply, given in zip(replies, line, strict=False))
            and line[len(replies)].startswith(conversation.begun_reply)
        ]
        if not fitting:
            sentence = f"no line of the script has a reply {len(replies) + 1} after {list(replies)}"
            raise BadRequestError({"message": sentence})
        if conversation.begun_reply:
            return fitting[0]  # a reply that was given before and is continued, so lines take no turn
        with self._lock:
            taken_count = self._taken_counts.get(replies, 0)
            self._taken_counts[replies] = taken_count + 1
        return fitting[taken_count % len(fitting)]


def read_script(path: Path) -> GivenReplies:
    """Reads a file of replies.

    Raises:
        ConfigError: a line is no reply and no list of replies, or the file has no line.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
            lines.append([_text_of(reply) for reply in (value if isinstance(value, list) else [value])])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{path}, line {number}: a reply is "a text" or {{"content": …, "tool_calls": […]}}, and a line is a '
                f"reply or a list of replies ({error})"
            ) from error
    if not lines:
        raise ConfigError(f"{path} holds no reply")
    return GivenReplies(lines)


def _text_of(reply: Any) -> str:
    if isinstance(reply, str):
        return reply
    if not isinstance(reply, Mapping) or not reply.keys() & {"content", "tool_calls"}:
        raise ValueError(f"{reply!r} is no reply")
    calls = [call.get("function", call) for call in reply.get("tool_calls") or ()]
    written = [{"name": call["name"], "arguments": _arguments_of(call)} for call in calls]
    parts = [reply.get("content") or "", *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written)]
    return "\n".join(part for part in parts if part)


def _arguments_of(call: Mapping[str, Any]) -> Any:
    arguments = call.get("arguments", {})
    return json.loads(arguments) if isinstance(arguments, str) else arguments
