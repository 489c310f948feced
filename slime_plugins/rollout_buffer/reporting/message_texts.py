"""The texts of a trajectory's messages, for previews and search. Pure.

Payloads come from third-party programs: values that do not have the form of messages are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

PREVIEW_LENGTH = 200
MAX_CHARACTERS_READ = 4000
"""Number of characters of a text from which a preview is made."""
_ENDS_OF_THOUGHT = ("</think>", "</thinking>")
_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_TAG = re.compile(r"</?(?:tool_call|conclusion|answer)>")


@dataclass(frozen=True, slots=True)
class MessageText:
    """A text of a message. ``turn`` is the number, from 1, of the reply that the message is or precedes."""

    turn: int
    role: str
    text: str


def message_texts(payload: Mapping[str, Any]) -> Iterator[MessageText]:
    """Yields every text of a payload's messages in order, reasoning and tool calls included."""
    turn = 1
    for message in _messages(payload):
        role = str(message.get("role", ""))[:40]
        texts = (_content(message), message.get("reasoning_content"), *_calls(message))
        yield from (MessageText(turn, role, text) for text in texts if isinstance(text, str) and text)
        turn += role == "assistant"


def preview_of(payload: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns task and answer in one line each: as the generator recorded them, else the first user message and the
    last reply; None if there is no such text."""
    extra_info = payload.get("extra_info")
    recorded: Mapping[str, Any] = extra_info if isinstance(extra_info, Mapping) else {}
    messages = list(_messages(payload))
    asked = next((each for each in messages if each.get("role") == "user"), {})
    replied: Mapping[str, Any] = next((each for each in reversed(messages) if each.get("role") == "assistant"), {})
    goal, answer = _line(recorded.get("goal")), _line(recorded.get("answer"))
    return goal or _line(_content(asked)), answer or _line(_reply_text(replied))


def _messages(payload: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    messages = payload.get("messages")
    return (each for each in (messages if isinstance(messages, list) else []) if isinstance(each, Mapping))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


def _calls(message: Mapping[str, Any]) -> Iterator[str]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments", "")
            shown = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
            yield f"{function.get('name', '')} {shown}"


def _reply_text(message: Mapping[str, Any]) -> str:
    """Returns a reply without reasoning and tool calls; if nothing else is left, the calls."""
    text = _content(message)
    ends = [at + len(tag) for tag in _ENDS_OF_THOUGHT if (at := text.rfind(tag)) >= 0]
    text_after = text[max(ends, default=0) :][:MAX_CHARACTERS_READ]
    words = _TAG.sub(" ", _CALL.sub(" ", text_after)).strip()
    return words or _TAG.sub(" ", text_after).strip() or next(_calls(message), "")


def _line(text: object) -> str | None:
    if not isinstance(text, str | int | float):
        return None
    line = " ".join(str(text)[:MAX_CHARACTERS_READ].split())
    return (line if len(line) <= PREVIEW_LENGTH else f"{line[: PREVIEW_LENGTH - 1]}…") or None
