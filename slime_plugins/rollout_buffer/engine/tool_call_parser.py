"""The parser of tool calls in model output. Pure; it accepts any text.

A call is the text between ``<tool_call>`` and ``</tool_call>``. Its first characters select the dialect:

    hermes       {"name": …, "arguments": {…}}                            Hermes, Qwen2.5, Qwen3, mobile_use
    qwen3_coder  <function=NAME><parameter=KEY>value</parameter>…</function>   Qwen3-Coder, Qwen3.5

``streamed_calls`` reads the same dialects of a reply that is still sampled.

Rules for incomplete or ambiguous output, for all callers:

* A call inside a thought is ignored. Thoughts are ``<think>`` blocks: a block without an end extends to the end of the
  text, and the text before a ``</think>`` without a start is a thought that the prompt began. Closed ``<thinking>``
  blocks, which some prompts ask for, are thoughts too.
* Marks inside of a string of a valid call belong to the string.
* A call of ``hermes`` with a key twice has a problem, because readers of JSON differ in which of the two they take.
* Arguments may be a JSON string, may be named ``parameters``, and may be missing.
* Line breaks inside of JSON strings are accepted. A value of ``qwen3_coder`` is a string if the tool's schema declares
  one; otherwise it is parsed as JSON, or else a string.
* A call without its end mark counts if it is complete and only the next call or the end of the text follows.
* Everything else after ``<tool_call>`` is a call with a ``problem``. Nothing is repaired: NaN, infinity, integers
  beyond 64 bits and halves of surrogate pairs are problems too, because they cannot be serialised again.

The caller decides how to handle a problem, or a second call.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NoReturn

CALL, CALL_END = "<tool_call>", "</tool_call>"
MAX_NESTING = 64

_MARK = re.compile(r"<tool_call>|<think>|</think>|<thinking>")
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
PARAMETER_END = "</parameter>"
_MAX_WORD = 16
"""Upper limit of the characters of a JSON token, such as ``false`` or an escape, that a window may cut."""

Tools = Sequence[Mapping[str, Any]]


class SegmentKind(StrEnum):
    TEXT = "text"
    THOUGHT = "thought"  # with its marks
    CALL = "call"  # with its marks


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call. ``problem`` is a clause with the reason why it is invalid; ``raw`` is the text between the marks."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of a reply. The joined texts of all segments are the reply; ``call`` is set if the kind is CALL."""

    kind: SegmentKind
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """A syntax of calls. ``read`` returns name and arguments of the call at an offset, and its end."""

    name: str
    begins: re.Pattern[str]
    read: Callable[[str, int, Tools], tuple[dict[str, Any], int]]


class _MalformedError(ValueError):
    """Carries the problem of a call to ``call_at``, which records it."""


def read_segments(text: str, tools: Tools = ()) -> list[Segment]:
    """Returns the segments of a reply, in order; none is empty.

    ``tools`` are the offered functions in OpenAI's form: their schemas decide which values are strings.
    """
    segments: list[Segment] = []
    pos = 0
    for start, end in _thoughts(text, tools):
        segments += _texts_and_calls(text, pos, start, tools)
        segments.append(Segment(kind=SegmentKind.THOUGHT, text=text[start:end]))
        pos = end
    return [*segments, *_texts_and_calls(text, pos, len(text), tools)]


def read_function(function: Any) -> ToolCall:
    """Returns the call of a ``name`` and ``arguments`` object, as models write and servers send it."""
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not _is_unicode(name):
        return ToolCall(name="", problem="the tool call does not name a function")
    try:
        return ToolCall(name=name, arguments=_arguments(function.get("arguments", function.get("parameters")), name))
    except _MalformedError as error:
        return ToolCall(name=name, problem=str(error))


# ---- segments --------------------------------------------------------------------------------------------------------


def _thoughts(text: str, tools: Tools) -> list[tuple[int, int]]:
    """Returns start and end of each thought. Marks inside of a valid call are ignored."""
    spans: list[tuple[int, int]] = []
    pos, last_end = 0, text.rfind("</thinking>")
    while (mark := _MARK.search(text, pos)) is not None:
        start, pos = mark.span()
        if mark[0] == CALL:
            _, end, is_whole = call_at(text, start, tools)
            pos = end if is_whole else pos
        elif mark[0] == "</think>":
            spans = [(0, pos)]  # opened by the prompt, or the mark is quoted in a thought: all before it is thought
        elif mark[0] == "<think>" or pos <= last_end:  # a <thinking> that is never closed is text
            end_mark = f"</{mark[0][1:]}"
            end = text.find(end_mark, pos)
            pos = end + len(end_mark) if end >= 0 else len(text)
            spans.append((start, pos))
    return spans


def _texts_and_calls(text: str, pos: int, limit: int, tools: Tools) -> Iterator[Segment]:
    """Yields the segments between two thoughts: texts and calls."""
    while (start := text.find(CALL, pos, limit)) >= 0:
        call, end, _ = call_at(text, start, tools, limit)
        if start > pos:
            yield Segment(kind=SegmentKind.TEXT, text=text[pos:start])
        yield Segment(kind=SegmentKind.CALL, text=text[start:end], call=call)
        pos = end
    if pos < limit:
        yield Segment(kind=SegmentKind.TEXT, text=text[pos:limit])


def call_at(text: str, start: int, tools: Tools, limit: int | None = None) -> tuple[ToolCall, int, bool]:
    """Returns the call whose mark begins at ``start``, the end of its segment, and whether it is complete.

    A complete call was parsed to its end; its name or arguments may still have a problem. The segment of an incomplete
    call ends at ``limit`` at the latest.
    """
    content_start = start + len(CALL)
    try:
        function, pos = _dialect_at(text, content_start).read(text, content_start, tools)
        end = _end_of_call(text, pos)
    except _MalformedError as error:
        return _invalid_call(text, content_start, str(error), len(text) if limit is None else limit)
    call = read_function(function)
    raw = text[content_start : end - len(CALL_END) if text.endswith(CALL_END, pos, end) else end]
    return ToolCall(name=call.name, arguments=call.arguments, raw=raw.strip(), problem=call.problem), end, True


def _dialect_at(text: str, pos: int) -> Dialect:
    first = _space_end(text, pos)
    return next((dialect for dialect in DIALECTS if dialect.begins.match(text, first)), DIALECTS[0])


def _end_of_call(text: str, pos: int) -> int:
    """Returns the end of a call that was parsed up to ``pos``."""
    after = _space_end(text, pos)
    if text.startswith(CALL_END, after):
        return after + len(CALL_END)
    if after < len(text) and not text.startswith(CALL, after):
        _refuse(f"the tool call is followed by something other than {CALL_END}")
    return after


def _invalid_call(text: str, content_start: int, problem: str, limit: int) -> tuple[ToolCall, int, bool]:
    """Returns an invalid call: it extends to its end mark, the next call, or ``limit``."""
    following = text.find(CALL, content_start, limit)
    limit = limit if following < 0 else following
    closing = text.find(CALL_END, content_start, limit)
    if closing < 0:
        raw, end, problem = text[content_start:limit], limit, f"the tool call is not closed by {CALL_END}"
    else:
        raw, end = text[content_start:closing], closing + len(CALL_END)
    return ToolCall(name="", raw=raw.strip(), problem=problem), end, False


def _space_end(text: str, pos: int) -> int:
    space = _SPACE.match(text, pos)
    return space.end() if space else pos


# ---- dialects --------------------------------------------------------------------------------------------------------


def _read_hermes(text: str, pos: int, _tools: Tools) -> tuple[dict[str, Any], int]:
    function, end = _decoded(text, _space_end(text, pos), "the tool call")
    if not isinstance(function, dict):
        _refuse("the tool call is not a JSON object")
    return function, end


def _read_qwen3_coder(text: str, pos: int, tools: Tools) -> tuple[dict[str, Any], int]:
    opening = _FUNCTION.match(text, _space_end(text, pos))
    if opening is None:
        _refuse("the tool call has no <function=NAME>")
    name = opening[1].strip()
    texts = text_parameters(tools, name)
    spans: dict[str, tuple[int, int]] = {}
    pos, closings = opening.end(), _parameter_ends(text)
    while (parameter := PARAMETER.match(text, pos)) is not None:
        following = bisect_left(closings, parameter.end())
        if following == len(closings):
            _refuse(f"a parameter is not closed by {PARAMETER_END}")
        spans[parameter[1].strip()] = parameter.end(), closings[following]
        pos = closings[following] + len(PARAMETER_END)
    ending = _FUNCTION_END.match(text, pos)
    if ending is None:
        _refuse("the tool call is not closed by </function>, or has more than <parameter=KEY>value</parameter>")
    arguments = {key: parameter_value(text[start:end], is_text=key in texts) for key, (start, end) in spans.items()}
    return {"name": name, "arguments": arguments}, ending.end()


@lru_cache(maxsize=1)
def _parameter_ends(text: str) -> list[int]:
    """Returns the offsets of all parameter ends; once for each text, also if it has a thousand broken calls."""
    return [match.start() for match in re.finditer(PARAMETER_END, text)]


def parameter_value(text: str, *, is_text: bool) -> Any:
    """Returns a parameter's value; the template writes one line break before and one after it."""
    plain = text.removeprefix("\n").removesuffix("\n")
    if is_text:
        return plain
    try:
        value = _whole(text, "the value")
        _check_value(value)
    except _MalformedError:
        return plain
    return value


def text_parameters(tools: Tools, name: str) -> frozenset[str]:
    """Returns the parameters that a function's schema declares as strings."""
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping):
            schemas = {key: value for key, value in properties.items() if isinstance(value, Mapping)}
            return frozenset(key for key, value in schemas.items() if value.get("type") == "string")
    return frozenset()


DIALECTS: tuple[Dialect, ...] = (
    Dialect(name="hermes", begins=re.compile(r"\{"), read=_read_hermes),
    Dialect(name="qwen3_coder", begins=re.compile(r"<function="), read=_read_qwen3_coder),
)
"""All dialects. A call that matches none is parsed, and refused, as the first."""


# ---- values ----------------------------------------------------------------------------------------------------------


def _arguments(given: Any, name: str) -> dict[str, Any]:
    if isinstance(given, str):
        given = _whole(given, "the text of the arguments") if given.strip() else None
    if given is None:
        return {}
    if not isinstance(given, dict):
        _refuse(f"the arguments of {name[:80]} must be a JSON object")
    _check_value(given)
    return given


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"the tool call is not valid JSON ({name} is not allowed)")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        _refuse("the tool call has a key twice")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, object_pairs_hook=_each_key_once)


def read_scalar(text: str) -> str | None:
    """Returns a number, ``true``, ``false`` or ``null`` as compact JSON; None if the text is none of these."""
    import orjson  # here: generator.context_editing.calls is public, and light to import

    try:
        value, end = _decoded(text, 0, "the value")
        _check_value(value)
    except _MalformedError:
        return None
    return orjson.dumps(value).decode() if end == len(text) else None


def _whole(text: str, what: str) -> Any:
    value, end = _decoded(text, _space_end(text, 0), what)
    if text[end:].strip():
        _refuse(f"{what} is not valid JSON (more follows after it)")
    return value


def _decoded(text: str, pos: int, what: str, window: int = 4096) -> tuple[Any, int]:
    """Returns the JSON value at ``pos``, and its end.

    It parses ``window`` characters, and more only if the value is longer. The json module counts the lines of its whole
    input for an error message, which takes long for the thousands of broken calls of a model that repeats itself.
    """
    part = text[pos : pos + window]
    try:
        value, end = _DECODER.raw_decode(part)
        return value, pos + end
    except _MalformedError:
        raise
    except json.JSONDecodeError as error:
        if len(part) == window and (error.pos > window - _MAX_WORD or error.msg.startswith("Unterminated")):
            return _decoded(text, pos, what, window * 16)
        _refuse(f"{what} is not valid JSON ({error.msg}, at character {error.pos})")
    except ValueError:
        _refuse(f"{what} is not valid JSON (an integer has thousands of digits)")
    except RecursionError:
        _refuse(f"{what} is not valid JSON that can be read (it is nested too deeply)")


def _check_value(value: Any, depth: int = 0) -> None:
    """Refuses values that JSON can represent but that cannot be serialised again."""
    if depth > MAX_NESTING:
        _refuse(f"the arguments are nested deeper than {MAX_NESTING} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key, depth + 1)
            _check_value(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, depth + 1)
    elif isinstance(value, str):
        if not _is_unicode(value):
            _refuse("a text in the arguments holds half of a surrogate pair")
    elif isinstance(value, float):
        if not math.isfinite(value):
            _refuse("a number in the arguments is too large")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse("a number in the arguments is too large")


def _is_unicode(text: str) -> bool:
    """Returns False for half of a surrogate pair, which JSON can represent but UTF-8 cannot."""
    return text.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _refuse(problem: str) -> NoReturn:
    raise _MalformedError(problem)
