"""Parses a model's reply into one validated action. Pure; never raises on invalid text.

A reply looks like ``<thinking>…</thinking><tool_call>{"name": "mobile_use", "arguments": {…}}</tool_call>
<conclusion>…</conclusion>``. A reply without exactly one valid call becomes a ``MalformedAction``, with a message for
the agent.

Rules that the tool's description leaves open:

* ``engine/tool_call_parser.py`` parses the call. There must be exactly one call outside of the thinking: two calls
  would be ambiguous.
* Coordinates from 0 to 1000 are accepted and clamped to 999, because models of this family were trained on both scales.
  Larger coordinates are malformed: clamping them would reward a guess at the edge.
* Fields that an action does not use are ignored. A missing ``status`` means success, and a missing ``time`` of
  ``wait`` means ``DEFAULT_WAIT_S``; any other missing field is an error.
* A number as ``text`` and a number in quotes as ``time`` are converted; a longer ``wait`` is cut to ``MAX_WAIT_S``.
  ``ParsedAction.corrected`` names the converted or cut field.
* Names of actions, buttons and statuses are case-insensitive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall, read_segments
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import COORDINATE_MAX, MOBILE_USE_TOOL, TOOL_NAME

COORDINATE_TOLERANCE = 1
MAX_TOOL_CALL_CHARACTERS = 16_384
MAX_TEXT_CHARACTERS = 4_096
MAX_LONG_PRESS_S = 10.0
MAX_WAIT_S = 30.0
DEFAULT_WAIT_S = 1.0
_QUOTED_CHARACTERS = 40

Point = tuple[float, float]
ToPixel = Callable[[Point], tuple[int, int]]
_Name = TypeVar("_Name", ActionKind, SystemButton)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAction:
    """A valid action, in device pixels, with its points in the model's 999x999 space."""

    action: Action
    coordinate: Point | None = None
    coordinate2: Point | None = None
    corrected: str = ""
    """The field whose value was converted, cut or assumed; empty for a call as the tool describes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedAction:
    """A reply without a valid action; ``reason`` is a message for the agent."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedReply:
    """A reply in its three parts. ``thinking`` and ``conclusion`` are empty when their tags are missing."""

    thinking: str
    conclusion: str
    action: ParsedAction | MalformedAction


class _RefusedError(ValueError):
    """Carries the reason of a refusal to ``parse_reply``."""


def to_pixels(point: Point, screen_width: int, screen_height: int) -> tuple[int, int]:
    """Returns the pixel of a point in the model's space: (999, 999) is the last pixel, and not one past it."""
    x, y = point
    return round(x / COORDINATE_MAX * (screen_width - 1)), round(y / COORDINATE_MAX * (screen_height - 1))


def parse_reply(text: str, *, screen_width: int, screen_height: int) -> ParsedReply:
    """Returns thinking, conclusion and action of a reply; accepts any text.

    ``screen_width`` and ``screen_height`` are the device's pixels: a coordinate c becomes ``round(c / 999 * (W - 1))``,
    so that 999 is the last pixel and not one past it.
    """
    pixel = partial(to_pixels, screen_width=screen_width, screen_height=screen_height)
    try:
        action: ParsedAction | MalformedAction = _read_action(_tool_call(text), pixel)
    except _RefusedError as refusal:
        action = MalformedAction(reason=str(refusal))
    return ParsedReply(thinking=_thinking(text), conclusion=_last_tagged(text, "conclusion"), action=action)


def _thinking(text: str) -> str:
    """Returns all thinking: the model's own ``<think>``, which the prompt may have opened, and ``<thinking>``."""
    head, closing_tag, rest = text.partition("</think>")
    if not closing_tag:
        return _tagged(text, "thinking")
    thinking = head.partition("<think>")[2] if "<think>" in head else head
    return "\n".join(part for part in (thinking.strip(), _tagged(rest, "thinking")) if part)


def _tagged(text: str, tag: str) -> str:
    """Returns the text between the first opening tag and the next closing tag; linear in the text."""
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside.strip() if opened and closed else ""


def _last_tagged(text: str, tag: str) -> str:
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if opened and closed else ""


def _tool_call(text: str) -> ToolCall:
    """Returns the only call of the reply; refuses a reply with any other number of calls."""
    calls = [segment.call for segment in read_segments(text, [MOBILE_USE_TOOL]) if segment.call is not None]
    if not calls:
        _refuse("it has no <tool_call>" + (" but inside its thinking" if "<tool_call>" in text else ""))
    if len(calls) > 1:
        _refuse("it has more than one <tool_call>")
    if len(calls[0].raw) > MAX_TOOL_CALL_CHARACTERS:
        _refuse(f"its <tool_call> is longer than {MAX_TOOL_CALL_CHARACTERS} characters")
    if calls[0].problem is not None:
        _refuse(calls[0].problem)
    return calls[0]


def _read_action(call: ToolCall, pixel: ToPixel) -> ParsedAction:
    if call.name != TOOL_NAME:
        _refuse(f'the function is named {_quote(call.name)}, not "{TOOL_NAME}"')
    kind = _choice(call.arguments, "action", ActionKind)
    arguments, corrected = _corrected(kind, call.arguments)
    return replace(_READERS[kind](arguments, pixel), corrected=corrected)


def _corrected(kind: ActionKind, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Returns the arguments, with one convertible, too long or missing value replaced, and the name of its field."""
    if kind in (ActionKind.TYPE, ActionKind.ANSWER, ActionKind.OPEN):
        field, value = "text", arguments.get("text")
        accepted = value if _finite(value) is None else str(value)
    elif kind in (ActionKind.WAIT, ActionKind.LONG_PRESS):
        field, value = "time", arguments.get("time")
        accepted = _number_in(value) if isinstance(value, str) else value
        if kind is ActionKind.WAIT and (_finite(accepted) or 0) > MAX_WAIT_S:
            accepted = MAX_WAIT_S
    elif kind is ActionKind.TERMINATE:
        field, value = "status", arguments.get("status")
        accepted = "success" if value is None else value
    else:
        return arguments, ""
    return (arguments, "") if accepted is value else ({**arguments, field: accepted}, field)


def _number_in(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# ---- one reader per action -------------------------------------------------------------------------------------------


def _read_click(arguments: Mapping[str, Any], pixel: ToPixel) -> ParsedAction:
    point = _point(arguments, "coordinate")
    return ParsedAction(action=Action(kind=ActionKind.CLICK, point=pixel(point)), coordinate=point)


def _read_long_press(arguments: Mapping[str, Any], pixel: ToPixel) -> ParsedAction:
    point = _point(arguments, "coordinate")
    duration_s = _seconds(arguments, MAX_LONG_PRESS_S)
    action = Action(kind=ActionKind.LONG_PRESS, point=pixel(point), duration_s=duration_s)
    return ParsedAction(action=action, coordinate=point)


def _read_swipe(arguments: Mapping[str, Any], pixel: ToPixel) -> ParsedAction:
    start, end = _point(arguments, "coordinate"), _point(arguments, "coordinate2")
    action = Action(kind=ActionKind.SWIPE, point=pixel(start), end_point=pixel(end))
    return ParsedAction(action=action, coordinate=start, coordinate2=end)


def _read_text(kind: ActionKind, arguments: Mapping[str, Any], _pixel: ToPixel) -> ParsedAction:
    return ParsedAction(action=Action(kind=kind, text=_text(arguments)))


def _read_open(arguments: Mapping[str, Any], _pixel: ToPixel) -> ParsedAction:
    app = _text(arguments).strip()
    if not app:
        _refuse('"text" names no app')
    return ParsedAction(action=Action(kind=ActionKind.OPEN, text=app))


def _read_system_button(arguments: Mapping[str, Any], _pixel: ToPixel) -> ParsedAction:
    return ParsedAction(action=Action(kind=ActionKind.SYSTEM_BUTTON, button=_choice(arguments, "button", SystemButton)))


def _read_wait(arguments: Mapping[str, Any], _pixel: ToPixel) -> ParsedAction:
    duration_s = DEFAULT_WAIT_S if arguments.get("time") is None else _seconds(arguments, MAX_WAIT_S)
    return ParsedAction(action=Action(kind=ActionKind.WAIT, duration_s=duration_s))


def _read_terminate(arguments: Mapping[str, Any], _pixel: ToPixel) -> ParsedAction:
    status = _string(arguments, "status").strip().lower()
    if status not in ("success", "failure"):
        _refuse(f'"status" is {_quote(status)}, not one of "success", "failure"')
    return ParsedAction(action=Action(kind=ActionKind.TERMINATE, status=status))


_READERS: dict[ActionKind, Callable[[Mapping[str, Any], ToPixel], ParsedAction]] = {
    ActionKind.CLICK: _read_click,
    ActionKind.LONG_PRESS: _read_long_press,
    ActionKind.SWIPE: _read_swipe,
    ActionKind.TYPE: partial(_read_text, ActionKind.TYPE),
    ActionKind.ANSWER: partial(_read_text, ActionKind.ANSWER),
    ActionKind.SYSTEM_BUTTON: _read_system_button,
    ActionKind.OPEN: _read_open,
    ActionKind.WAIT: _read_wait,
    ActionKind.TERMINATE: _read_terminate,
}


# ---- one reader per field --------------------------------------------------------------------------------------------


def _needed(arguments: Mapping[str, Any], field: str) -> Any:
    value = arguments.get(field)
    if value is None:
        _refuse(f'"{field}" is missing')
    return value


def _string(arguments: Mapping[str, Any], field: str) -> str:
    value = _needed(arguments, field)
    if not isinstance(value, str):
        _refuse(f'"{field}" is not a string')
    return value


def _text(arguments: Mapping[str, Any]) -> str:
    text = _string(arguments, "text")
    if not text:
        _refuse('"text" is empty')
    if len(text) > MAX_TEXT_CHARACTERS:
        _refuse(f'"text" is longer than {MAX_TEXT_CHARACTERS} characters')
    if "\0" in text:
        _refuse('"text" holds characters that no keyboard can type')
    return text


def _choice(arguments: Mapping[str, Any], field: str, names: type[_Name]) -> _Name:
    value = _string(arguments, field)
    chosen = {name.value.lower(): name for name in names}.get(value.strip().lower())
    if chosen is None:
        known = ", ".join(f'"{name.value}"' for name in names)
        _refuse(f'"{field}" is {_quote(value)}, not one of {known}')
    return chosen


def _point(arguments: Mapping[str, Any], field: str) -> Point:
    value = _needed(arguments, field)
    if not isinstance(value, list) or len(value) != 2:
        _refuse(f'"{field}" is not a list of two numbers')
    return _coordinate(value[0], field), _coordinate(value[1], field)


def _coordinate(value: object, field: str) -> float:
    number = _finite(value)
    if number is None:
        _refuse(f'"{field}" is not a list of two numbers')
    if not 0 <= number <= COORDINATE_MAX + COORDINATE_TOLERANCE:
        _refuse(f'"{field}" lies outside of the {COORDINATE_MAX}x{COORDINATE_MAX} screen')
    return min(number, COORDINATE_MAX)


def _seconds(arguments: Mapping[str, Any], longest_s: float) -> float:
    number = _finite(_needed(arguments, "time"))
    if number is None:
        _refuse('"time" is not a number of seconds')
    if not 0 < number <= longest_s:
        _refuse(f'"time" must be more than 0 and at most {longest_s:g} seconds')
    return float(number)


def _finite(value: object) -> float | int | None:
    """Returns a finite number; None for NaN, an infinity (1e999), a bool, a string."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _quote(value: object) -> str:
    """Returns a string of the reply as JSON of at most ``_QUOTED_CHARACTERS`` characters, for an error message."""
    return json.dumps(value)[:_QUOTED_CHARACTERS] if isinstance(value, str) else "missing or not a string"


def _refuse(reason: str) -> NoReturn:
    raise _RefusedError(reason)
