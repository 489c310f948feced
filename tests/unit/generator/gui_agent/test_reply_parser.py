"""From reply text to action: nine actions, many ways to be malformed, and never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import (
    MAX_TEXT_CHARACTERS,
    MalformedAction,
    ParsedAction,
    ParsedReply,
    parse_reply,
)

WIDTH, HEIGHT = 1080, 2400


def parse(text: str) -> ParsedReply:
    return parse_reply(text, screen_width=WIDTH, screen_height=HEIGHT)


def reply(**arguments: Any) -> str:
    call = json.dumps({"name": "mobile_use", "arguments": arguments})
    return f"<thinking>look</thinking>\n<tool_call>\n{call}\n</tool_call>\n<conclusion>done</conclusion>"


def action(**arguments: Any) -> Action:
    parsed = parse(reply(**arguments)).action
    assert isinstance(parsed, ParsedAction), parsed
    return parsed.action


def reason(text: str) -> str:
    parsed = parse(text).action
    assert isinstance(parsed, MalformedAction), parsed
    return parsed.reason


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"action": "click", "coordinate": [0, 999]}, Action(kind=ActionKind.CLICK, point=(0, 2399))),
        # Models use both scales: one past 999 is clamped.
        ({"action": "click", "coordinate": [1000, 1000]}, Action(kind=ActionKind.CLICK, point=(1079, 2399))),
        (
            {"action": "long_press", "coordinate": [999, 0], "time": 2},
            Action(kind=ActionKind.LONG_PRESS, point=(1079, 0), duration_s=2.0),
        ),
        (
            {"action": "swipe", "coordinate": [500, 800], "coordinate2": [500, 200]},
            Action(kind=ActionKind.SWIPE, point=(540, 1921), end_point=(540, 480)),
        ),
        ({"action": "type", "text": " "}, Action(kind=ActionKind.TYPE, text=" ")),
        ({"action": "answer", "text": "42"}, Action(kind=ActionKind.ANSWER, text="42")),
        ({"action": "open", "text": " Chrome "}, Action(kind=ActionKind.OPEN, text="Chrome")),
        ({"action": "wait"}, Action(kind=ActionKind.WAIT, duration_s=1.0)),
        ({"action": "wait", "time": None}, Action(kind=ActionKind.WAIT, duration_s=1.0)),
        ({"action": "terminate", "status": " Success "}, Action(kind=ActionKind.TERMINATE, status="success")),
        ({"action": "wait", "time": 2.5}, Action(kind=ActionKind.WAIT, duration_s=2.5)),
        ({"action": "terminate", "status": "success"}, Action(kind=ActionKind.TERMINATE, status="success")),
        (
            {"action": "system_button", "button": "back"},
            Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.BACK),
        ),
    ],
)
def test_each_action_is_read_into_device_pixels(arguments: dict[str, Any], expected: Action) -> None:
    assert action(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected", "field"),
    [
        ({"action": "answer", "text": 42}, Action(kind=ActionKind.ANSWER, text="42"), "text"),
        ({"action": "type", "text": 4.5}, Action(kind=ActionKind.TYPE, text="4.5"), "text"),
        ({"action": "wait", "time": "2"}, Action(kind=ActionKind.WAIT, duration_s=2.0), "time"),
        ({"action": "wait", "time": "1e9"}, Action(kind=ActionKind.WAIT, duration_s=30.0), "time"),
        ({"action": "wait", "time": 60}, Action(kind=ActionKind.WAIT, duration_s=30.0), "time"),
        ({"action": "wait", "time": 30}, Action(kind=ActionKind.WAIT, duration_s=30.0), ""),
        ({"action": "terminate"}, Action(kind=ActionKind.TERMINATE, status="success"), "status"),
        ({"action": "terminate", "status": "failure"}, Action(kind=ActionKind.TERMINATE, status="failure"), ""),
    ],
)
def test_a_value_that_can_mean_only_one_thing_is_read_and_its_field_is_named(
    arguments: dict[str, Any], expected: Action, field: str
) -> None:
    parsed = parse(reply(**arguments)).action
    assert isinstance(parsed, ParsedAction), parsed
    assert (parsed.action, parsed.corrected) == (expected, field)


@pytest.mark.parametrize(
    ("before", "thought"),
    [
        ("", "look"),
        ("<think>perhaps <tool_call>{}</tool_call></think>\n", "perhaps <tool_call>{}</tool_call>\nlook"),
        ("the prompt opened it</think>", "the prompt opened it\nlook"),
        ("<think>\n\n</think>", "look"),
        ("<think>only <thinking>this</thinking></think>", "only <thinking>this</thinking>\nlook"),
    ],
)
def test_thinking_and_conclusion_are_taken_out_of_their_tags_and_a_models_own_thinking_calls_nothing(
    before: str, thought: str
) -> None:
    parsed = parse(before + reply(action="wait"))
    assert (parsed.thinking, parsed.conclusion) == (thought, "done")
    assert isinstance(parsed.action, ParsedAction)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I would rather talk.", "no <tool_call>"),
        (reply(action="wait") * 2, "more than one"),
        ("<thinking><tool_call>{}</tool_call></thinking>", "but inside its thinking"),
        ("<tool_call>{", "not closed"),
        ("</tool_call>{}<tool_call>", "not closed"),
        ("<tool_call>{broken</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 9999 + "</tool_call>", "not valid JSON"),
        (f'<tool_call>{{"a": {"9" * 5000}}}</tool_call>', "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "not a JSON object"),
        ('<tool_call>{"name": "mobile_use"}</tool_call>', '"action" is missing'),
        ('<tool_call>{"name": "mobile_use", "arguments": []}</tool_call>', "arguments of mobile_use must be"),
        ('<tool_call>{"name": "laptop_use", "arguments": {}}</tool_call>', 'named "laptop_use"'),
        ("<tool_call>" + "x" * 20_000 + "</tool_call>", "longer than"),
        (reply(), '"action" is missing'),
        (reply(action=["click"]), '"action" is not a string'),
        (reply(action="drag"), '"drag", not one of "click"'),
        (reply(action="click"), '"coordinate" is missing'),
        (reply(action="click", coordinate="500, 300"), "list of two numbers"),
        (reply(action="click", coordinate=[1, 2, 3]), "list of two numbers"),
        (reply(action="click", coordinate=[True, 2]), "list of two numbers"),
        (reply(action="click", coordinate=["1", "2"]), "list of two numbers"),
        (reply(action="click", coordinate=[1001, 5]), "outside of the 999x999 screen"),
        (reply(action="click", coordinate=[-1, 5]), "outside of the 999x999 screen"),
        (reply(action="click", coordinate=[540, 1200]), "outside of the 999x999 screen"),
        (reply(action="click", coordinate=[float("nan"), 5]), "NaN is not allowed"),
        (reply(action="click", coordinate=[float("inf"), 5]), "Infinity is not allowed"),
        (
            reply(action="click", coordinate=[0, 0]).replace("[0, 0]", "[1e999, 0]"),
            "number in the arguments is too large",
        ),
        (reply(action="click", coordinate=[10**400, 5]), "number in the arguments is too large"),
        (reply(action="swipe", coordinate=[1, 2]), '"coordinate2" is missing'),
        (reply(action="long_press", coordinate=[1, 2]), '"time" is missing'),
        (reply(action="long_press", coordinate=[1, 2], time=0), "more than 0"),
        (reply(action="wait", time="long"), "not a number of seconds"),
        (reply(action="long_press", coordinate=[1, 2], time=11), "at most 10 seconds"),
        (reply(action="wait", time="nan"), "not a number of seconds"),
        (reply(action="wait", time=True), "not a number of seconds"),
        (reply(action="type", text=True), '"text" is not a string'),
        (reply(action="type", text=""), '"text" is empty'),
        (reply(action="type", text="x" * (MAX_TEXT_CHARACTERS + 1)), "longer than"),
        (reply(action="type", text="\ud83d"), "half of a surrogate pair"),
        (reply(action="type", text="a\0b"), "no keyboard can type"),
        (reply(action="open", text="  "), "names no app"),
        (reply(action="system_button", button="Power"), '"Power", not one of "Back"'),
        (reply(action="terminate", status="maybe"), '"maybe", not one of'),
    ],
)
def test_a_malformed_reply_is_a_value_with_a_reason(text: str, words: str) -> None:
    assert words in reason(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)
field_names = st.sampled_from(["action", "coordinate", "coordinate2", "text", "time", "button", "status"])
kinds = st.sampled_from([str(kind) for kind in ActionKind])
pieces = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<thinking>", "</thinking>", '{"name": "mobile_use", "arguments":']
    ),
)


@given(st.lists(pieces, max_size=10).map("".join))
@example("<tool_call>null</tool_call>")
def test_any_text_gives_an_answer(text: str) -> None:
    parsed = parse(text)
    assert isinstance(parsed.action, ParsedAction | MalformedAction)


@given(kind=kinds, fields=st.dictionaries(field_names, json_values, max_size=4))
def test_any_arguments_give_a_point_on_the_screen_or_a_reason(kind: str, fields: dict[str, Any]) -> None:
    parsed = parse(reply(**(fields | {"action": kind}))).action
    if isinstance(parsed, MalformedAction):
        assert parsed.reason
        return
    for point in (parsed.action.point, parsed.action.end_point):
        assert point is None or (0 <= point[0] < WIDTH and 0 <= point[1] < HEIGHT)


@given(x=st.integers(0, 999), y=st.integers(0, 999), width=st.integers(1, 4000), height=st.integers(1, 4000))
def test_every_point_of_the_scale_lands_on_every_screen(x: int, y: int, width: int, height: int) -> None:
    parsed = parse_reply(reply(action="click", coordinate=[x, y]), screen_width=width, screen_height=height).action
    assert isinstance(parsed, ParsedAction)
    assert parsed.action.point is not None
    assert 0 <= parsed.action.point[0] < width
    assert 0 <= parsed.action.point[1] < height
