"""Tool calls in what a model wrote: one reader, and whoever uses it finds the same calls in the same reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.tool_call_parser import read_segments
from slime_plugins.rollout_buffer.generator.context_editing.calls import read_calls
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import MOBILE_USE_TOOL
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import ParsedAction
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import parse_reply as phone_reply
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import calls_of, message_with_calls
from tests.reply_streams import gateway_message

Call = tuple[str, Mapping[str, Any]]

TYPE_42: Call = ("mobile_use", {"action": "type", "text": "42"})
WAIT: Call = ("mobile_use", {"action": "wait"})


def written(call: Call) -> str:
    return json.dumps({"name": call[0], "arguments": call[1]})


def closed(call: Call) -> str:
    return f"<tool_call>\n{written(call)}\n</tool_call>"


def coder(*parameters: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=mobile_use>\n{inside}</function>\n</tool_call>"


REPLIES: dict[str, tuple[str, list[Call]]] = {
    "plain": (f"I type.\n{closed(TYPE_42)}", [TYPE_42]),
    "no call": ("I would rather talk.", []),
    "not closed": (f"<tool_call>\n{written(TYPE_42)}", [TYPE_42]),
    "not closed before the next": (f"<tool_call>{written(WAIT)}\n{closed(TYPE_42)}", [WAIT, TYPE_42]),
    "several": (f"{closed(WAIT)}\n{closed(TYPE_42)}", [WAIT, TYPE_42]),
    "arguments as a string": (
        f"<tool_call>{json.dumps({'name': 'mobile_use', 'arguments': json.dumps(TYPE_42[1])})}</tool_call>",
        [TYPE_42],
    ),
    "arguments by another name": (
        f"<tool_call>{json.dumps({'name': 'mobile_use', 'parameters': TYPE_42[1]})}</tool_call>",
        [TYPE_42],
    ),
    "coder": (coder(("action", "type"), ("text", "42")), [TYPE_42]),
    "coder, not closed": (coder(("action", "type"), ("text", "42")).removesuffix("\n</tool_call>"), [TYPE_42]),
    "thought of": (f"<think>perhaps {closed(WAIT)}</think>\n{closed(TYPE_42)}", [TYPE_42]),
    "thought of in a block that the prompt opened": (f"perhaps {closed(WAIT)}</think>\n{closed(TYPE_42)}", [TYPE_42]),
    "only thought of": (f"<think>perhaps {closed(WAIT)}</think>\nNo.", []),
    "thought of in a second block": (
        f"<think>hm</think>\n<think>perhaps {closed(WAIT)}</think>\n{closed(TYPE_42)}",
        [TYPE_42],
    ),
    "between two thoughts": (f"<think>hm</think>{closed(TYPE_42)}<think>was that it</think>", [TYPE_42]),
    "a thought that never ends": (f"<think>perhaps {closed(WAIT)}", []),
    "thought of, with the marks that prompts ask for": (
        f"<thinking>perhaps {closed(WAIT)}</thinking>\n{closed(TYPE_42)}",
        [TYPE_42],
    ),
    "after such a thought that was not closed": (f"<thinking>I type.\n{closed(TYPE_42)}", [TYPE_42]),
    "line breaks in a string": (
        '<tool_call>{"name": "mobile_use", "arguments": {"action": "type", "text": "4\n2"}}</tool_call>',
        [("mobile_use", {"action": "type", "text": "4\n2"})],
    ),
    "marks in a string": (
        closed(("mobile_use", {"action": "type", "text": "<tool_call> ends with </tool_call>, </think> a thought"})),
        [("mobile_use", {"action": "type", "text": "<tool_call> ends with </tool_call>, </think> a thought"})],
    ),
    "marks in a coder's value": (
        coder(("action", "type"), ("text", "</function>\n</tool_call>")),
        [("mobile_use", {"action": "type", "text": "</function>\n</tool_call>"})],
    ),
}
"""What each reply asks for, whoever reads it."""

BROKEN = {
    "no JSON": "<tool_call>{broken</tool_call>",
    "cut": '<tool_call>{"name": "mobile_use", "argum',
    "cut coder": "<tool_call><function=mobile_use>\n<parameter=action>\nwai",
    "no object": "<tool_call>[1]</tool_call>",
    "no name": '<tool_call>{"arguments": {"action": "wait"}}</tool_call>',
    "arguments that are no object": '<tool_call>{"name": "mobile_use", "arguments": [1]}</tool_call>',
    "a number that is none": '<tool_call>{"name": "mobile_use", "arguments": {"time": NaN}}</tool_call>',
    "an infinite number": '<tool_call>{"name": "mobile_use", "arguments": {"time": 1e999}}</tool_call>',
    "a number of many digits": f'<tool_call>{{"name": "mobile_use", "arguments": {{"time": {"9" * 30}}}}}</tool_call>',
    "a key twice": '<tool_call>{"name": "mobile_use", "arguments": {"time": 1e999, "time": 1}}</tool_call>',
    "half a pair": '<tool_call>{"name": "mobile_use", "arguments": {"text": "\\ud83d"}}</tool_call>',
    "nested without end": '<tool_call>{"name": "mobile_use", "arguments": {"text": ' + "[" * 100_000 + "</tool_call>",
    "nested deeply": f'<tool_call>{{"name": "mobile_use", "arguments": {{"text": {"[" * 90}{"]" * 90}}}}}</tool_call>',
    "a thought before its end mark": f"<tool_call>{written(WAIT)}<think>hm</think>",
    "more than a call": f"<tool_call>{written(WAIT)} and more</tool_call>",
    "a parameter that is not closed": ("<tool_call><function=mobile_use><parameter=action>wait</function></tool_call>"),
}
"""What begins like a call and is none that could be made."""


# ---- whoever reads calls ---------------------------------------------------------------------------------------------


def by_the_gateway(text: str) -> list[Call]:
    prompt = "<think>" if text.startswith("perhaps") else ""  # the gateway knows what the prompt opened
    message = gateway_message(text, prompt, tools=[MOBILE_USE_TOOL])
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def by_the_remote_server(text: str) -> list[Call]:
    calls = calls_of({"role": "assistant", "content": text}, 0, tools=[MOBILE_USE_TOOL])
    return [(call.name, call.arguments) for call in calls if call.problem is None]


def by_the_document_tools(text: str) -> list[Call]:
    return [(call.name, call.arguments) for call in read_calls(text) if call.problem is None]


READERS: dict[str, Callable[[str], list[Call]]] = {
    "gateway": by_the_gateway,
    "remote rollout": by_the_remote_server,
    "context editing": by_the_document_tools,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reply", REPLIES)
def test_every_reader_finds_the_same_calls(reader: str, reply: str) -> None:
    text, calls = REPLIES[reply]
    if reader == "context editing" and reply.startswith("coder"):
        calls = [(name, {**arguments, "text": 42}) for name, arguments in calls]  # no tool of its own has this name
    assert READERS[reader](text) == calls


@pytest.mark.parametrize("reply", REPLIES)
def test_the_phone_does_what_the_one_call_of_a_reply_says(reply: str) -> None:
    text, calls = REPLIES[reply]
    action = phone_reply(text, screen_width=1080, screen_height=2400).action
    if len(calls) == 1:
        assert isinstance(action, ParsedAction), action
        assert action.action == Action(kind=ActionKind.TYPE, text=calls[0][1]["text"])
    else:
        assert not isinstance(action, ParsedAction)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("reply", BROKEN)
def test_no_reader_makes_a_call_of_what_is_none(reader: str, reply: str) -> None:
    assert READERS[reader](BROKEN[reply]) == []


@pytest.mark.parametrize("reply", BROKEN)
def test_what_is_no_call_is_kept_by_the_gateway_and_answered_by_the_others(reply: str) -> None:
    text = BROKEN[reply]
    assert gateway_message(text, tools=[MOBILE_USE_TOOL]) == {"role": "assistant", "content": text}
    assert message_with_calls(text, 0) == {"role": "assistant", "content": text}
    assert [bool(call.problem) for call in calls_of({"content": text}, 0)] == [True]
    assert [bool(call.problem) for call in read_calls(text)] == [True]
    assert not isinstance(phone_reply(text, screen_width=9, screen_height=9).action, ParsedAction)


# ---- the pieces of a reply -------------------------------------------------------------------------------------------

marks = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<thinking>", "</thinking>", "<function=f>", "<function=",
        "</function>", "<parameter=a>", "</parameter>", '{"name": "f", "arguments": ', '{"a": 1}', "}", '"', "\\", "\n",
        "[", "é", closed(WAIT), coder(("action", "wait")),
    ]
)  # fmt: skip
replies = st.lists(st.one_of(marks, st.text(max_size=5)), max_size=14).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
arguments = st.dictionaries(st.one_of(st.text(max_size=6), marks), st.one_of(json_values, marks), max_size=3)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)


@given(replies)
def test_a_call_of_any_text_has_a_name_or_a_problem_and_can_be_sent_on(text: str) -> None:
    for segment in read_segments(text):
        if segment.call is not None and segment.call.problem is None:
            assert segment.call.name
            assert json.loads(json.dumps(segment.call.arguments, allow_nan=False).encode()) == segment.call.arguments


@given(replies, replies)
def test_no_call_is_found_inside_of_a_thought(thought: str, said: str) -> None:
    thought, said = (text.replace("think", "thank") for text in (thought, said))
    calls = [segment.call for segment in read_segments(said) if segment.call is not None]
    for begins in ("<think>", "<thinking>"):
        ends = begins.replace("<", "</")
        found = read_segments(f"{begins}{thought}{ends}{said}")
        assert found[0].text == f"{begins}{thought}{ends}"
        assert [segment.call for segment in found if segment.call is not None] == calls


@given(thought=texts, called=arguments)
def test_a_call_comes_back_as_it_was_written(thought: str, called: Mapping[str, Any]) -> None:
    text = f"<think>{thought}</think>{closed(('f', called))}\n{closed(('g', {}))}"
    calls = [segment.call for segment in read_segments(text) if segment.call is not None]
    assert [(call.name, call.arguments, call.problem) for call in calls] == [("f", called, None), ("g", {}, None)]


@pytest.mark.parametrize("length", [10, 70_000, 300_000])
def test_long_calls_are_read_whole(length: int) -> None:
    called = {"text": "x" * length, "list": list(range(length // 10))}
    (segment,) = read_segments(closed(("write", called)))
    assert segment.call is not None
    assert segment.call.arguments == called
