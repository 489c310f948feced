"""Replies from a file, instead of the scripted policies: ``rollout-buffer engine --script FILE``.

A line of the file is one conversation: a list of replies, one for each turn, or a single reply. A reply is a text, or
an assistant's message with ``content`` and ``tool_calls``, which are written as Hermes' calls. Conversations that begin
take the lines in turn; a later turn goes on with a line whose replies were said before.
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
"""What the generator ``statelm`` leaves of a reply that the policy deleted."""


class GivenReplies:
    """A policy that returns the file's replies."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._taken: dict[tuple[str, ...], int] = {}
        self._lock = threading.Lock()

    def __call__(self, conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
        """Returns the next reply of a line that fits what was said so far; of several, the next in turn.

        Raises:
            BadRequestError: no line goes on from here.
        """
        said = tuple(conversation.replies)
        fitting = [
            line[len(said)]
            for line in self._lines
            if len(line) > len(said)
            and all(one == given or DELETED.fullmatch(one) for one, given in zip(said, line, strict=False))
            and line[len(said)].startswith(conversation.begun_reply)
        ]
        if not fitting:
            raise BadRequestError({"message": f"no line of the script has a reply {len(said) + 1} after {list(said)}"})
        if conversation.begun_reply:
            return fitting[0]
        with self._lock:
            taken = self._taken.get(said, 0)
            self._taken[said] = taken + 1
        return fitting[taken % len(fitting)]


def read_script(path: Path) -> GivenReplies:
    """Reads a file of replies.

    Raises:
        ConfigError: a line is no reply and no list of replies, or there is none.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            given = json.loads(text)
            lines.append([_text_of(reply) for reply in (given if isinstance(given, list) else [given])])
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f'{path}, line {number}: a reply is "a text" or {{"content": …, "tool_calls": […]}}, and a line one of '
                f"them or a list of them ({error})"
            ) from error
    if not lines:
        raise ConfigError(f"{path} holds no reply")
    return GivenReplies(lines)


def _text_of(reply: Any) -> str:
    if isinstance(reply, str):
        return reply
    if not isinstance(reply, Mapping) or not reply.keys() & {"content", "tool_calls"}:
        raise ValueError(f"{reply!r} is neither")
    calls = [call.get("function", call) for call in reply.get("tool_calls") or ()]
    written = [{"name": call["name"], "arguments": _arguments_of(call)} for call in calls]
    parts = [reply.get("content") or "", *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in written)]
    return "\n".join(part for part in parts if part)


def _arguments_of(call: Mapping[str, Any]) -> Any:
    arguments = call.get("arguments", {})
    return json.loads(arguments) if isinstance(arguments, str) else arguments
