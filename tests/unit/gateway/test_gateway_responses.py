"""OpenAI's Responses at the gateway: its official client, its types, and what is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.gateway.chat_requests import read_chat_body
from slime_plugins.rollout_buffer.gateway.dialects.dialect import RESPONSES
from slime_plugins.rollout_buffer.gateway.dialects.openai_responses import read_request, read_response_id
from slime_plugins.rollout_buffer.recording.messages import read_conversation
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.example_counts import examples
from tests.gateway_support import GatewayUnderTest, gateway_on, start_session_job, tokenizer
from tests.support import PNG

if TYPE_CHECKING:
    import openai
    from openai.types.responses import Response

PICTURE: Any = {"type": "input_image", "image_url": wire.encode_data_uri(PNG), "detail": "auto"}


@asynccontextmanager
async def session_of(
    folder: Path, *replies: Any, **options: Any
) -> AsyncIterator[tuple[GatewayUnderTest, dict[str, Any], openai.AsyncOpenAI, FakeEngine]]:
    """A gateway whose engine says ``replies``, an open session, and the official client for it."""
    engine = FakeEngine(replies, tokenizer=tokenizer, **options)
    async with gateway_on(folder, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        yield gateway, opened, gateway.client(opened), engine


async def asked(client: openai.AsyncOpenAI, *, streamed: bool, **body: Any) -> Response:
    """One turn, streamed or not, as the client puts it together."""
    import openai

    if not streamed:
        created: Response = await client.responses.create(model="policy", **body)
        return created
    async with client.responses.stream(model="policy", **body) as stream:
        last: Any = [event async for event in stream][-1]
    assert last.type in ("response.completed", "response.incomplete")
    return openai.types.responses.Response.model_validate(
        last.response.model_dump(exclude={"output": {"__all__": {"parsed_arguments"}}})
    )


async def test_any_response_of_the_session_can_be_continued_without_its_instructions(
    tmp_path: Path,
) -> None:
    async with session_of(tmp_path, *map(str, range(9))) as (_, _, client, engine):
        first = await asked(client, streamed=False, input="a", instructions="Count.")
        await asked(client, streamed=False, input="b", previous_response_id=first.id, instructions="Count.")
        await asked(client, streamed=False, input="c", previous_response_id=first.id)
        prompt = tokenizer.decode(engine.requests[2].input_ids)
        assert prompt == (
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("response_id", "problem"),
    [
        ("nonsense", "is no id of a response: 'nonsense'"),
        *(
            (name, "names no response of this session")
            for name in ("resp_1.0.0.0.1-7", "resp_1.0.0.0.1-0", "resp_another-1")
        ),
    ],
)
async def test_a_previous_response_of_nobody_is_refused(tmp_path: Path, response_id: str, problem: str) -> None:
    import openai

    async with session_of(tmp_path, "yes") as (_, _, client, _):
        await asked(client, streamed=False, input="a")
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            await asked(client, streamed=False, input="b", previous_response_id=response_id)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "previous_response_id")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_says_that_it_was_cut_and_what_it_cost(tmp_path: Path, streamed: bool) -> None:
    import openai

    async with session_of(tmp_path, "one two", "one two") as (_, _, client, engine):
        turn = await asked(
            client, streamed=streamed, input="Count.", max_output_tokens=1, include=["message.output_text.logprobs"]
        )
        assert (turn.status, turn.output_text) == ("incomplete", "one")
        assert turn.incomplete_details is not None
        assert turn.incomplete_details.reason == "max_output_tokens"
        assert turn.usage is not None
        assert (turn.usage.input_tokens, turn.usage.output_tokens) == (len(engine.requests[0].input_ids), 1)
        (message,) = turn.output
        assert message.type == "message"
        assert message.content[0].type == "output_text"
        assert [one.token for one in message.content[0].logprobs or []] == ["one"]
        openai.types.responses.Response.model_validate(turn.model_dump(), strict=True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": ["hello"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "hello"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{**PICTURE, "image_url": "data:image/jpeg;base64,iVBO"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "look", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0].content"),
        ({"input": "a", "tools": [{"type": "computer_use_preview"}]}, "tools[0]"),
        ({"input": "a", "metadata": 1}, "metadata"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": [{**PICTURE, "image_url": "http://a"}]}]}, "input[0].content[0]"),
        ({"input": "a", "tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"input": "a", "tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(body: Any, field: str) -> None:
    assert read_response_id(body) is None
    with pytest.raises(InvalidPayloadError) as refused:
        read_chat_body(read_request(body, [])[0], RESPONSES.client_names)
    assert refused.value.detail == {"param": field}
    assert field in refused.value.message


# --- any conversation ------------------------------------------------------------------------------------------------

TEXT = st.text("ab \n", min_size=1, max_size=5)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chat messages: rounds of a user, an assistant with calls, and their results in any order."""
    found: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        calls = [
            {"id": f"call_{number}_{at}", "function": {"name": "look", "arguments": f'{{"at":{at}}}'}}
            for at in range(draw(st.integers(0, 3)))
        ]
        said: dict[str, Any] = {"role": "assistant", "content": draw(TEXT), "tool_calls": calls}
        if draw(st.booleans()):
            said["reasoning_content"] = draw(TEXT)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)} for call in draw(st.permutations(calls))
        ]
        found += [{"role": draw(st.sampled_from(["user", "developer"])), "content": draw(TEXT)}, said, *results]
    return [*found, {"role": "user", "content": "end"}]


def items_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client of OpenAI sends for a chat message."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": [{"type": "input_text", "text": message["content"]}]}]
    thoughts = [message[key] for key in ("reasoning_content",) if key in message]
    return [
        *(
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": one}]}
            for one in thoughts
        ),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": message["content"]}]},
        *({"type": "function_call", "call_id": call["id"], **call["function"]} for call in message["tool_calls"]),
    ]


@examples(100)
@given(conversations(), st.data())
def test_any_conversation_is_read_as_it_was_held(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    ends = [at + 1 for at, message in enumerate(messages) if message["role"] == "assistant"]
    known = data.draw(st.sampled_from([0, *ends]))
    items = [item for message in messages[known:] for item in items_of(message)]
    history = read_conversation(messages[:known]).messages if known else ()
    assert read_conversation(read_request({"input": items}, history)[0]["messages"]) == read_conversation(messages)


def test_items_of_one_reply_are_one_message_in_any_order() -> None:
    items = [
        {
            "type": kind,
            "id": f"{prefix}_1.0.0.0.1-{reply}_{at}",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
        }
        for reply, kind, prefix, at, text in (
            ("aa", "message", "msg", 0, "a"),
            ("aa", "reasoning", "rs", 1, "why"),
            ("aa", "message", "msg", 2, "b"),
            ("bb", "message", "msg", 0, "c"),
        )
    ]
    read = read_conversation(read_request({"input": items}, [])[0]["messages"]).messages
    assert read == (
        {"role": "assistant", "content": "a\nb", "reasoning_content": "why"},
        {"role": "assistant", "content": "c"},
    )
