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
from slime_plugins.rollout_buffer.gateway.replies import ChatReply, Piece
from slime_plugins.rollout_buffer.gateway.reply_stream import ReplyStream
from slime_plugins.rollout_buffer.types import Message
from tests.example_counts import examples
from tests.gateway_support import tokenizer
from tests.reply_streams import BEGUN, END_OF_TURN, ByteTokens, gateway_message, reply_stream

TOOLS: Any = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
]
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "é</tool_call>"}}\n</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>"

marks = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<think>", "</think>", "<thinking>", "</thinking>", "<", '{"name": "f"}', "}",
        " ", "\n", "é", "🙂", "STOP", "ST", HERMES, CODER,
    ]
)  # fmt: skip
texts = st.lists(st.one_of(marks, st.text(max_size=4)), max_size=10).map("".join)
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
        if piece.call is not None:
            message.setdefault("tool_calls", []).append(piece.call["function"])
        else:
            assert piece.text
            message[piece.key] = message.get(piece.key, "") + piece.joint + piece.text
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
    stream.tell_rest()
    assert without_call_ids(message) == put_together(told)
    whole = reply_stream(prompt, **body).end(ids)
    assert without_call_ids(message) == without_call_ids(whole)


@examples(200)
@given(texts)
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
    stream.tell_rest()
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
    stream.tell_rest()
    assert message == put_together(told)


# --- how early -------------------------------------------------------------------------------------------------------


def told_after(said: str, **body: Any) -> list[str]:
    """What is told when a reply has come so far, while more may come."""
    told: list[Piece | ChatReply] = []
    prompt = body.pop("prompt", "")
    stream = reply_stream(prompt, told.append, **body)
    stream.add(list(said.encode()))
    return [f"call {one.call['function']['name']}" if one.call else one.text for one in told if isinstance(one, Piece)]


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
        (HERMES[:-1], CALLS, []),
        (HERMES, CALLS, ["call f"]),
        (CODER, CALLS, ["call f"]),
        (f"{CODER}\n<tool_call>\n<func", CALLS, ["call f"]),
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


def test_a_call_that_cannot_be_read_stays_text_and_is_told_at_the_end() -> None:
    text = f"First {HERMES[:-20]} no. {CODER} Last"
    assert gateway_message(text, tools=TOOLS)["content"] == f"First {HERMES[:-20]} no.\nLast"


def test_texts_and_thoughts_that_are_parted_are_joined_by_a_line_break() -> None:
    text = f"<think>a </think> one <think> b</think>{CODER} two {CODER}\n"
    message = gateway_message(text, tools=TOOLS, separate_reasoning=True)
    assert (message["content"], message["reasoning_content"]) == ("one\ntwo", "a\nb")
