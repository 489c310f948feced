"""Reads the tool calls out of what was sampled. Whatever stands there, reading it gives calls and never raises.

    <tool_call>
    {"name": "readChunk", "arguments": {"chunk_id": 3}}
    </tool_call>

A call that cannot be read is a call with ``problem`` set: it is answered with that sentence, like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["UNREADABLE", "CallReader", "ToolCall", "read_calls", "said_beside_calls", "without_surrogates"]

UNREADABLE = "unreadable"
"""The tool's name in the answer to a call that cannot be read."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_SHAPE = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call. ``problem`` says why it could not be read; ``raw`` is what stood between the marks."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    problem: str | None = None


CallReader = Callable[[str], Sequence[ToolCall]]
"""What a sampled turn asks for, from its text; empty when it asks for nothing."""


def read_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a turn in order; what is thought before the last ``</think>`` counts as none."""
    said = text.rpartition("</think>")[2]
    return [_read_call(match.group(1).strip()) for match in _CALL.finditer(said)]


def said_beside_calls(text: str) -> str:
    """Returns what a turn says beside its calls."""
    return _CALL.sub("", text.rpartition("</think>")[2]).strip()


def without_surrogates(value: Any) -> Any:
    """Returns the value with lone surrogates replaced: JSON can spell them, UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(inner) for key, inner in value.items()}
    return [without_surrogates(inner) for inner in value] if isinstance(value, list) else value


def _read_call(raw: str) -> ToolCall:
    try:
        call = without_surrogates(json.loads(raw, strict=False))
    except (ValueError, RecursionError) as error:
        return _unreadable(raw, f"the tool call is not valid JSON ({error}); write {_SHAPE}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return _unreadable(raw, f"a tool call is one JSON object with the tool's name: {_SHAPE}")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return _unreadable(raw, f"the arguments of {call['name'][:80]} must be a JSON object")
    return ToolCall(name=call["name"], arguments=arguments or {}, raw=raw)


def _decoded(arguments: str) -> Any:
    """Arguments come as JSON text from models that were taught so; anything else stays what it is, and is refused."""
    try:
        return without_surrogates(json.loads(arguments, strict=False)) if arguments.strip() else None
    except (ValueError, RecursionError):
        return arguments


def _unreadable(raw: str, problem: str) -> ToolCall:
    return ToolCall(name=UNREADABLE, raw=raw, problem=problem)
