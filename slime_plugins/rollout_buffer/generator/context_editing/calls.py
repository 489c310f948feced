"""The tool calls of a sampled turn, as the tools answer them: one that cannot be read gets a result that says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from slime_plugins.rollout_buffer.engine.tool_call_parser import SegmentKind, ToolCall, read_segments
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import schemas, tools_for

UNREADABLE = "unreadable"
"""The tool's name in the answer to a call that cannot be read."""

_SHAPE = '{"name": "...", "arguments": {...}}'

CallReader = Callable[[str], Sequence[ToolCall]]
"""What a sampled turn asks for, from its text; empty when it asks for nothing."""


def read_calls(text: str) -> list[ToolCall]:
    """Returns the calls of a turn in order; one with a ``problem`` has the name ``UNREADABLE``."""
    offered = schemas(tools_for(editing=True))
    calls = [segment.call for segment in read_segments(text, offered) if segment.call is not None]
    return [call if call.problem is None else _unreadable(call, call.problem) for call in calls]


def text_outside_calls(text: str) -> str:
    """Returns what a turn says beside its calls and its thoughts."""
    return "".join(segment.text for segment in read_segments(text) if segment.kind is SegmentKind.TEXT).strip()


def _unreadable(call: ToolCall, problem: str) -> ToolCall:
    return replace(call, name=UNREADABLE, arguments={}, problem=f"{problem}; write {_SHAPE}")
