"""A reply that is converted while it is sampled: any ids, in any pieces, and how early what is decided goes out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.tool_call_parser import read_segments
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, Piece
from slime_plugins.rollout_buffer.gateway.reply_pieces import ReplyStream
from slime_plugins.rollout_buffer.recording.messages import read_arguments
from slime_plugins.rollout_buffer.types import Message
from tests.example_counts import examples
from tests.gateway_support import tokenizer
from tests.reply_streams import (
    BEGUN,
    CODER,
    END_OF_TURN,
    HERMES,
    TOOLS,
    ByteTokens,
    gateway_message,
    marks,
    reply_stream,
    texts,
)

bodies = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([None, TOOLS]),
        "separate_reasoning": st.booleans(),
        "stop": st.sampled_from([None, "STOP", ["TO", "STOP"], ["STOP!", "é🙂"]]),
    }
)
ids_of_bytes = st.one_of(texts.map(lambda text: list(text.encode())), st.lists(st.integers(0, 255), max_size=12))


def put_together(pieces: Sequence[Piece | ChatReply]) -> Message:
    """The message of a client that has heard the pieces; calls without their ids."""
    message: Message = {"role": "assistant", "content": ""}
    assert pieces[0] is BEGUN
    for piece in pieces[1:]:
        assert isinstance(piece, Piece)
        if piece.call_id:
            message.setdefault("tool_calls", []).append({"name": piece.name, "arguments": piece.text})
        elif piece.key == "tool_calls":
            message["tool_calls"][-1]["arguments"] += piece.text
        else:
            assert piece.text
            message[piece.key] = message.get(piece.key, "") + piece.joint + piece.text
    for call in message.get("tool_calls", ()):
        call["arguments"] = read_arguments(call["arguments"])
    return message


def without_call_ids(message: Mapping[str, Any]) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


@examples(400)
@given(ids_of_bytes, bodies, st.sampled_from(["", "…<think>\n"]), st.booleans(), st.data())
def test_what_is_told_in_any_pieces_is_the_message_of_the_whole_reply(
    ids: list[int], body: Any, prompt: str, is_closed: bool, data: st.DataObject
) -> None:
    ids = [*ids, *([END_OF_TURN] if is_closed else [])]
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))]
    told: list[Piece | ChatReply] = []
    stream = reply_stream(prompt, told.append, **body)
    for start, end in itertools.pairwise(cuts):
        stream.add(ids[start:end])
    message = stream.end(ids)
    stream.emit_rest()
    assert without_call_ids(message) == put_together(told)
    assert message == reply_stream(prompt, told.append, **body).end(ids)
    if all(isinstance(call["function"]["arguments"], dict) for call in message.get("tool_calls", ())):
        assert message == reply_stream(prompt, **body).end(ids)


@examples(200)
@given(st.lists(st.one_of(marks, st.text(max_size=4)), max_size=10).map("".join))
def test_calls_and_thoughts_are_those_that_every_reader_of_replies_finds(text: str) -> None:
    text = text.replace("</think>", "")  # without a start it ends a thought that the prompt began: others guess
    segments = read_segments(text, TOOLS)
    calls = [one.call for one in segments if one.call is not None and one.call.problem is None]
    message = gateway_message(text, tools=TOOLS)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    assert functions == [{"name": call.name, "arguments": call.arguments} for call in calls]
    said = "".join(one.text for one in segments if one.call is None or one.call.problem is not None)
    assert message["content"].split() == said.split() or functions


@examples(100)
@given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20), st.data())
def test_any_tokens_are_told_as_the_text_that_they_decode_to(ids: list[int], data: st.DataObject) -> None:
    chat = ChatTokens(tokenizer)
    told: list[Piece | ChatReply] = []
    stream = ReplyStream(chat, ChatBody(), [], BEGUN, told.append, name="0")
    for token_id in ids[: data.draw(st.integers(0, len(ids)))]:
        stream.add([token_id])
    assert stream.end(ids)["content"] == chat.text(ids)
    stream.emit_rest()
    assert put_together(told)["content"] == chat.text(ids)


class ByteRuns(ByteTokens):
    """Decodes bytes as the tokenizers that fall back to them: a run of bytes is one text, or none of it is."""

    def decoded(self, ids: Sequence[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


@examples(100)
@given(ids_of_bytes, st.data())
def test_of_bytes_that_turn_out_to_be_no_text_what_was_told_is_recorded(ids: list[int], data: st.DataObject) -> None:
    tokens: Any = ByteRuns()
    told: list[Piece | ChatReply] = []
    stream = ReplyStream(tokens, ChatBody(), [], BEGUN, told.append, name="0")
    for token_id in ids[: data.draw(st.integers(0, len(ids)))]:
        stream.add([token_id])
    message = stream.end(ids)
    stream.emit_rest()
    assert message == put_together(told)


# --- how early -------------------------------------------------------------------------------------------------------


def told_after(said: str, **body: Any) -> list[str]:
    """What is told when a reply has come so far, while more may come."""
    told: list[Piece | ChatReply] = []
    prompt = body.pop("prompt", "")
    stream = reply_stream(prompt, told.append, **body)
    stream.add(list(said.encode()))
    return [f"{one.name}{one.text}" for one in told if isinstance(one, Piece)]


CALLS: Any = {"tools": TOOLS}
THOUGHTS: Any = {"separate_reasoning": True}


@pytest.mark.parametrize(
    ("said", "body", "told"),
    [
        ("Hel", {}, ["Hel"]),
        ("Hel <tool_", {}, ["Hel <tool_"]),  # nothing but text can come of it
        ("one S", {"stop": ["STOP"]}, ["one "]),
        ("one STO", {"stop": ["TO", "STOP"]}, ["one "]),
        ("one STOP two", {"stop": ["TO", "STOP"]}, ["one "]),
        ("I add. <tool_", CALLS, ["I add."]),
        ("I add. <tool_call>{", CALLS, ["I add."]),
        ("a < b", CALLS, ["a < b"]),
        (HERMES[:-1], CALLS, ['f{"a":"é']),  # a mark in a string may be the end of the call
        (HERMES, CALLS, ['f{"a":"é', '</tool_call>"}']),
        ('<tool_call>{"name": "f", "argum', CALLS, []),
        ('<tool_call>{"name": "f", "arguments": {', CALLS, ["f{"]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "on\\', CALLS, ['f{"a":[1,{"b":"on']),
        ('<tool_call>{"name": "f", "arguments": {"a": 12', CALLS, ['f{"a":']),  # may become 123
        ('<tool_call>{"name": "f", "arguments": {"a": 12}}\n', CALLS, ['f{"a":12']),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 99, CALLS, ['f{"a":' + "[" * 64]),  # clients parse it
        ('<tool_call>{"arguments": {"a": 12}, "name": "f"}', CALLS, []),
        ("<tool_call><function=f>\n<parameter=a>\non\n", CALLS, ['f{"a":"on']),
        ("<tool_call><function=f><parameter=b>[1", CALLS, ['f{"b":']),  # may become any text
        (CODER[:-1], CALLS, ['f{"a":"é"']),
        (CODER, CALLS, ['f{"a":"é"', "}"]),
        (f"{CODER}\n<tool_call>\n<func", CALLS, ['f{"a":"é"', "}"]),
        ("<tool_call>broken</tool_call> and on", CALLS, []),
        ("<think>\nI lo", THOUGHTS, ["I lo"]),
        ("I lo", {**THOUGHTS, "prompt": "<think>\n"}, ["I lo"]),
        ("<think>\nI look.\n</think>\n\nA c", THOUGHTS, ["I look.", "A c"]),
        (f"<think>{HERMES}", CALLS, ["<think>", HERMES]),
        ("<thinking>hm", CALLS, ["<thinking>", "hm"]),
        (f"<thinking>hm{HERMES}", CALLS, ["<thinking>", "hm"]),  # quoted, if </thinking> comes
    ],
)
def test_what_is_decided_is_told_at_once_and_what_is_not_is_held_back(said: str, body: Any, told: list[str]) -> None:
    assert told_after(said, **body) == told


@pytest.mark.parametrize(
    "end",
    ["}</tool_call>", "]}}</tool_call>", "</tool_call>", "", ' "c": 1}}</tool_call>', '}, "name": "g"}</tool_call>'],
)
def test_a_call_that_cannot_be_read_is_what_was_told_of_it_if_it_is_streamed_and_otherwise_text(end: str) -> None:
    text = f'I do. <tool_call>{{"name": "f", "arguments": {{"a": "on"{end}'
    message = reply_stream(tell=lambda one: None, tools=TOOLS).end([*f"{text}{CODER}".encode(), END_OF_TURN])
    (function, good) = (call["function"] for call in message["tool_calls"])
    assert (message["content"], function) == ("I do.", {"name": "f", "arguments": '{"a":"on"'})
    assert good == {"name": "f", "arguments": {"a": "é"}}
    assert gateway_message(text, tools=TOOLS) == {"role": "assistant", "content": text}


def test_a_call_that_cannot_be_read_stays_text_and_is_told_at_the_end() -> None:
    text = f"First {HERMES[:-20]} no. {CODER} Last"
    assert gateway_message(text, tools=TOOLS)["content"] == f"First {HERMES[:-20]} no.\nLast"


def test_texts_and_thoughts_that_are_parted_are_joined_by_a_line_break() -> None:
    text = f"<think>a </think> one <think> b</think>{CODER} two {CODER}\n"
    message = gateway_message(text, tools=TOOLS, separate_reasoning=True)
    assert (message["content"], message["reasoning_content"]) == ("one\ntwo", "a\nb")


def test_the_beginning_of_a_stop_sequence_at_the_end_of_a_reply_stays_text() -> None:
    assert gateway_message("one ST", messages=[], stop="STOP")["content"] == "one ST"
