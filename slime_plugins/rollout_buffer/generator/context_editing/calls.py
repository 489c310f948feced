"""Reads the tool calls out of what was sampled. Whatever stands there, reading it gives calls and never raises.

    <tool_call>
    {"name": "readChunk", "arguments": {"chunk_id": 3}}
    </tool_call>

A call that cannot be read is a call with ``problem`` set: it is answered with that sentence, like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.engine.sampled_json import read_sampled_json, said_after_thinking

__all__ = ["UNREADABLE", "CallReader", "ToolCall", "read_calls", "said_beside_calls"]

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
    said = said_after_thinking(text)
    return [_read_call(match.group(1).strip()) for match in _CALL.finditer(said)]


def said_beside_calls(text: str) -> str:
    """Returns what a turn says beside its calls."""
    return _CALL.sub("", said_after_thinking(text)).strip()


def _read_call(raw: str) -> ToolCall:
    try:
        call = read_sampled_json(raw)
    except ValueError as error:
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
        return read_sampled_json(arguments) if arguments.strip() else None
    except ValueError:
        return arguments


def _unreadable(raw: str, problem: str) -> ToolCall:
    return ToolCall(name=UNREADABLE, raw=raw, problem=problem)
