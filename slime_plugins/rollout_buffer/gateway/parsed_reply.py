"""Pure: converts sampled text into the message for the client.

``engine/tool_call_parser.py`` parses tool calls; a malformed call remains unchanged text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.engine.tool_call_parser import Segment, SegmentKind, ToolCall, read_segments

START_OF_REASONING, END_OF_REASONING = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """The parts of a reply; ``content`` is the text without reasoning and tool calls."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Returns the stop sequence that comes first in a text; None if there is none."""
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Returns the text before the first stop sequence, as OpenAI's API does."""
    stop = first_stop(text, stops)
    return text if stop is None else text[: text.find(stop)]


def parse_reply(text: str, *, tools: Sequence[Mapping[str, Any]] = (), separate_reasoning: bool = False) -> ParsedReply:
    """Parses a reply; never fails. Without ``tools`` no tool call is parsed."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for segment in read_segments(text, tools):
        if tools and segment.call is not None and segment.call.problem is None:
            calls.append(segment.call)
        elif separate_reasoning and _is_reasoning(segment):
            reasoning.append(
                segment.text.removesuffix(END_OF_REASONING).strip().removeprefix(START_OF_REASONING).strip()
            )
        else:
            content.append(segment.text)
    joined = "".join(content)
    return ParsedReply(
        content=joined.strip() if calls or separate_reasoning else joined,
        tool_calls=tuple(calls),
        reasoning="\n".join(filter(None, reasoning)) or None,
    )


def _is_reasoning(segment: Segment) -> bool:
    """True for the reasoning of a model (``<think>``); ``<thinking>`` is requested by prompts and stays content."""
    marks = segment.text.startswith(START_OF_REASONING) or segment.text.endswith(END_OF_REASONING)
    return segment.kind is SegmentKind.THOUGHT and marks
