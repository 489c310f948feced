"""The tool calls of a message, from its ``tool_calls`` or from its text, with ids and in OpenAI's form. Pure.

``engine/tool_call_parser.py`` parses the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.engine.tool_call_parser import SegmentKind, ToolCall, read_function, read_segments
from slime_plugins.rollout_buffer.types import Message

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedCall:
    """A call with its id. ``problem`` is the reason why it is invalid: the model gets it as the tool's answer."""

    call_id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def calls_of(message: Message, turn: int, tools: Tools = ()) -> list[NumberedCall]:
    """Returns the calls in an assistant message, in order; generated ids hold the turn and the position."""
    given = message.get("tool_calls")
    if isinstance(given, list) and given:
        objects = [call if isinstance(call, dict) else {} for call in given]
        parsed = [(read_function(call.get("function")), call.get("id")) for call in objects]
        return [_numbered(call, turn, place, call_id) for place, (call, call_id) in enumerate(parsed)]
    content = message.get("content")
    segments = read_segments(content, tools) if isinstance(content, str) else []
    calls = [segment.call for segment in segments if segment.call is not None]
    return [_numbered(call, turn, place) for place, call in enumerate(calls)]


def message_with_calls(text: str, turn: int, tools: Tools = ()) -> Message:
    """Returns the assistant message of a sampled text, with its calls in OpenAI's form and the text before as content.

    A text with an invalid call, or with other text after its first call, stays content as a whole.
    """
    segments = read_segments(text, tools)
    places = [place for place, segment in enumerate(segments) if segment.kind is SegmentKind.CALL]
    ending = segments[places[0] :] if places else []
    calls = [segment.call for segment in ending if segment.call is not None]
    outside = "".join(segment.text for segment in ending if segment.call is None)
    if not calls or any(call.problem for call in calls) or outside.strip():
        return {"role": "assistant", "content": text}
    content = "".join(segment.text for segment in segments[: places[0]]).rstrip("\n")
    tool_calls = [_openai(_numbered(call, turn, place)) for place, call in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _openai(call: NumberedCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _numbered(call: ToolCall, turn: int, place: int, call_id: Any = None) -> NumberedCall:
    given_or_made_id = str(call_id or f"call_{turn}_{place}")
    return NumberedCall(call_id=given_or_made_id, name=call.name, arguments=call.arguments, problem=call.problem)
