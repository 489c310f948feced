"""Reads the tool calls of a sampled turn. A malformed call has a ``problem``, and gets an error as its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from slime_plugins.rollout_buffer.engine.tool_call_parser import SegmentKind, ToolCall, read_segments
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import schemas, tools_for

UNREADABLE = "unreadable"
"""The tool name in the answer to a malformed call."""

_CALL_FORMAT = '{"name": "...", "arguments": {...}}'

CallReader = Callable[[str], Sequence[ToolCall]]
"""Returns the tool calls in the text of a sampled turn; empty if it has none."""


def read_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a turn in order; a call with a ``problem`` gets the name ``UNREADABLE``."""
    offered = schemas(tools_for(editing=True))
    calls = [segment.call for segment in read_segments(text, offered) if segment.call is not None]
    return [call if call.problem is None else _unreadable(call, call.problem) for call in calls]


def text_outside_calls(text: str) -> str:
    """Returns the text of a turn outside of its calls and thoughts."""
    return "".join(segment.text for segment in read_segments(text) if segment.kind is SegmentKind.TEXT).strip()


def _unreadable(call: ToolCall, problem: str) -> ToolCall:
    return replace(call, name=UNREADABLE, arguments={}, problem=f"{problem}; write {_CALL_FORMAT}")
