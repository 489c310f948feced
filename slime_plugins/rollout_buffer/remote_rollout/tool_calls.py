"""Tool calls in what a model wrote: found, taken apart, put into OpenAI's form. Pure.

Two spellings are read: the ``tool_calls`` that a server parsed already, and the text
``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` that ChatML models write. What is thought is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.engine.sampled_json import read_sampled_json, said_after_thinking
from slime_plugins.rollout_buffer.types import Message

__all__ = ["ToolCall", "calls_of", "message_with_calls"]

_MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call. ``problem`` says why it cannot be made: the model is told, and may try again."""

    call_id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def calls_of(message: Message, turn: int) -> list[ToolCall]:
    """Returns the calls in an assistant message, in order; ids that are missing name the turn and the place."""
    given = message.get("tool_calls")
    if isinstance(given, list) and given:
        return [_read_given(call, f"call_{turn}_{place}") for place, call in enumerate(given)]
    content = message.get("content")
    marked = _MARKED.findall(said_after_thinking(content)) if isinstance(content, str) else []
    return [_read_marked(text, f"call_{turn}_{place}") for place, text in enumerate(marked)]


def message_with_calls(text: str, turn: int) -> Message:
    """Returns the assistant message of a sampled text with its calls in OpenAI's form, and only the rest as content.

    Text that holds anything but complete calls at its end stays as it is.
    """
    start = text.find("<tool_call>", len(text) - len(said_after_thinking(text)))
    tail = text[start:] if start >= 0 else ""
    calls = calls_of({"content": tail}, turn)
    if not calls or any(call.problem for call in calls) or _MARKED.sub("", tail).strip():
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text[:start].rstrip("\n"), "tool_calls": [_openai(call) for call in calls]}


def _openai(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _read_given(call: Any, default_id: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return ToolCall(call_id=default_id, name="", problem="the tool call has no function")
    return _checked(function, str(call.get("id") or default_id))


def _read_marked(text: str, call_id: str) -> ToolCall:
    try:
        function = read_sampled_json(text)
    except ValueError as error:
        return ToolCall(call_id=call_id, name="", problem=f"the tool call is not JSON: {error}")
    return _checked(function, call_id)


def _checked(function: Mapping[str, Any], call_id: str) -> ToolCall:
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name:
        return ToolCall(call_id=call_id, name="", problem="the tool call names no tool")
    if isinstance(arguments, str):
        try:
            arguments = read_sampled_json(arguments or "{}")
        except ValueError as error:
            return ToolCall(call_id=call_id, name=name, problem=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call_id=call_id, name=name, problem="the arguments are not an object")
    return ToolCall(call_id=call_id, name=name, arguments=arguments)
