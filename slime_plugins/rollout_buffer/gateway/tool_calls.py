"""Pure: from the text that a model sampled to the message that a client is given.

A tool call is what stands between ``<tool_call>`` and ``</tool_call>``, in one of two forms that models were trained
on: an object ``{"name": …, "arguments": {…}}`` (Qwen2.5, Qwen3, Hermes), or
``<function=NAME><parameter=KEY>value</parameter>…</function>`` (Qwen3-Coder, Qwen3.5). What is neither stays text:
nothing is mended, and nothing is lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["ParsedReply", "ToolCall", "cut_at_stop", "parse_reply"]

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
END_OF_REASONING = "</think>"
START_OF_REASONING = "<think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A function that the model called, with the arguments it gave."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """A reply in its parts. ``content`` is all that is neither reasoning nor a tool call."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Returns the text before the first stop sequence in it, as OpenAI's interface wants it."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def parse_reply(text: str, *, with_tools: bool, separate_reasoning: bool = False) -> ParsedReply:
    """Reads a reply; any text whatever gives an answer. Tool calls are looked for only after the reasoning."""
    before, ended, after = text.partition(END_OF_REASONING)
    reasoned, rest = (before + ended, after) if ended else ("", text)
    calls: tuple[ToolCall, ...] = ()
    if with_tools:
        rest, calls = _take_tool_calls(rest)
    if separate_reasoning:
        reasoning = reasoned.removesuffix(END_OF_REASONING).strip().removeprefix(START_OF_REASONING).strip()
        return ParsedReply(content=rest.strip(), tool_calls=calls, reasoning=reasoning or None)
    content = reasoned + rest
    return ParsedReply(content=content.strip() if calls else content, tool_calls=calls)


def _take_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    calls: list[ToolCall] = []
    left: list[str] = []
    at = 0
    for block in _BLOCK.finditer(text):
        call = _read_call(block[1])
        if call is not None:
            left.append(text[at : block.start()])
            calls.append(call)
            at = block.end()
    return "".join([*left, text[at:]]), tuple(calls)


def _read_call(text: str) -> ToolCall | None:
    function = _FUNCTION.match(text)
    if function is not None:
        arguments = {key.strip(): _value(value) for key, value in _PARAMETER.findall(function[2])}
        return ToolCall(name=function[1].strip(), arguments=arguments)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    given: Any = call.get("arguments", call.get("parameters", {}))
    return ToolCall(name=call["name"], arguments=given) if _is_plain(given) else None


def _value(text: str) -> Any:
    """A parameter's value: what it is as JSON (numbers, lists …), else the text without its outer line breaks."""
    stripped = text.strip()
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return text.strip("\n")
    return value if _is_plain({"value": value}) else text.strip("\n")


def _is_plain(arguments: Any) -> bool:
    """True for an object that can be written as JSON again: no NaN, no half of a surrogate pair, no huge integer."""
    try:
        return (
            isinstance(arguments, dict) and bool(json.dumps(arguments, allow_nan=False).encode()) and _fits(arguments)
        )
    except (ValueError, RecursionError):
        return False


def _fits(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_fits(key) and _fits(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_fits, value))
    if isinstance(value, str):
        return value.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    return not isinstance(value, int) or abs(value) < 2**63
