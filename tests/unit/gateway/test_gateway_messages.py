"""Anthropic's Messages at the gateway: its official client, its types, and what is recorded."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.errors import EngineError, InvalidPayloadError
from slime_plugins.rollout_buffer.gateway import app
from slime_plugins.rollout_buffer.gateway.chat_requests import read_chat_body
from slime_plugins.rollout_buffer.gateway.dialects.anthropic_messages import read_request
from slime_plugins.rollout_buffer.gateway.dialects.dialect import MESSAGES
from slime_plugins.rollout_buffer.recording.messages import read_conversation
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.example_counts import examples
from tests.gateway_support import GatewayUnderTest, gateway_on, start_session_job, tokenizer
from tests.support import PNG, PNG_HASH

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message, MessageParam

USER: MessageParam = {"role": "user", "content": "What is on the screen?"}
TOOLS: Any = [
    {
        "name": "look",
        "description": "Looks.",
        "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}},
    }
]
CALLS = "".join(f'\n<tool_call>\n{{"name": "look", "arguments": {{"at": {at}}}}}\n</tool_call>' for at in (1, 2))
PICTURE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()},
}


@asynccontextmanager
async def session_of(
    folder: Path, *replies: Any, **options: Any
) -> AsyncIterator[tuple[GatewayUnderTest, dict[str, Any], anthropic.AsyncAnthropic, FakeEngine]]:
    """A gateway whose engine says ``replies``, an open session, and the official client for it."""
    engine = FakeEngine(replies, tokenizer=tokenizer, **options)
    async with gateway_on(folder, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        yield gateway, opened, gateway.anthropic_client(opened), engine


async def asked(client: anthropic.AsyncAnthropic, *, streamed: bool, **body: Any) -> Message:
    """One turn, streamed or not, as the client puts it together."""
    body = {"model": "policy", "max_tokens": 100, **body}
    if not streamed:
        created: Message = await client.messages.create(**body)
        return created
    async with client.messages.stream(**body) as stream:
        return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "text", "ended"),
    [
        ({}, "one END two", ("end_turn", None)),
        ({"stop_sequences": ["nothing", "END"]}, "one", ("stop_sequence", "END")),
        ({"max_tokens": 1}, "one", ("max_tokens", None)),
    ],
)
async def test_a_turn_says_why_it_ended_and_what_it_cost(
    tmp_path: Path, streamed: bool, options: Any, text: str, ended: Any
) -> None:
    import anthropic

    async with session_of(tmp_path, "one END two") as (_, _, client, engine):
        counted = await client.messages.count_tokens(model="policy", system="Be brief.", messages=[USER], tools=TOOLS)
        turn = await asked(client, streamed=streamed, system="Be brief.", messages=[USER], tools=TOOLS, **options)
        assert [block.text for block in turn.content if block.type == "text"] == [text]
        assert (turn.stop_reason, turn.stop_sequence) == ended
        assert turn.usage.input_tokens == counted.input_tokens == len(engine.requests[0].input_ids)
        assert turn.usage.output_tokens == (1 if "max_tokens" in options else len(tokenizer.encode("one END two")) + 1)
        anthropic.types.Message.model_validate(turn.model_dump(), strict=True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_a_stop_sequence_cut_is_not_to_be_run(tmp_path: Path, streamed: bool) -> None:
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "here END"}}\n</tool_call>'
    async with session_of(tmp_path, said) as (_, _, client, _):
        turn = await asked(client, streamed=streamed, messages=[USER], tools=TOOLS, stop_sequences=["END"])
        assert (turn.stop_reason, turn.stop_sequence) == ("stop_sequence", "END")


async def test_a_key_is_taken_as_x_api_key_and_as_bearer(tmp_path: Path) -> None:
    import anthropic

    async with session_of(tmp_path, "Yes.", "Yes.") as (gateway, opened, _, _):
        for credentials in ({"api_key": opened["api_key"]}, {"auth_token": opened["api_key"]}):
            async with anthropic.AsyncAnthropic(base_url=gateway.url, **credentials) as client:
                assert (await asked(client, streamed=False, messages=[USER])).stop_reason == "end_turn"
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="sk-wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await asked(client, streamed=False, messages=[USER])
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["type"], refused.value.type) == ("error", "authentication_error")


async def test_an_engine_that_fails_after_keep_alives_alone_is_an_error_event_of_an_overload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    monkeypatch.setattr(app, "KEEP_ALIVE_INTERVAL_S", 0.01)
    async with session_of(tmp_path, EngineError("it went away"), delay_s=0.2) as (_, _, client, _):
        with pytest.raises(anthropic.APIStatusError, match="it went away") as failed:
            await asked(client, streamed=True, messages=[USER])
    assert failed.value.body == {"type": "error", "error": {"type": "overloaded_error", "message": "it went away"}}


def result(content: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}]
    }


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": ["hello"]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hello"]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "messages[1]"),
        ({"messages": [USER], "system": [PICTURE]}, "system[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0]"),
        (result([{"type": "document", "source": {}}]), "messages[0].content[0].content[0]"),
        (result([{"type": "image", "source": {"type": "file"}}]), "messages[0].content[0].content[0].source"),
        (
            result([{**PICTURE, "source": {**PICTURE["source"], "media_type": "image/jpeg"}}]),
            "messages[0].content[0].content[0].source",
        ),
        ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"messages": [USER], "tool_choice": "auto"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": ["auto"]}}, "tool_choice"),
        ({"messages": [USER], "mcp_servers": [{"type": "url", "url": "http://here"}]}, "mcp_servers"),
        ({"messages": [USER], "compaction": {"type": "enabled"}}, "compaction"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a"}}]}
                ]
            },
            "messages[0].content[0].source",
        ),
        ({"messages": [USER], "stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"messages": [USER], "output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(body: Any, field: str) -> None:
    with pytest.raises(InvalidPayloadError) as refused:
        read_chat_body(read_request(body)[0], MESSAGES.client_names)
    assert refused.value.detail == {"param": field}
    assert field in refused.value.message


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_clients_tool_runner_sends_its_whole_conversation_since_threads_are_not_held(
    tmp_path: Path, streamed: bool
) -> None:
    import anthropic

    @anthropic.beta_async_tool
    async def look(at: int) -> str:
        """Looks."""
        return f"saw {at}"

    async with session_of(tmp_path, f"I look.{CALLS}", "A cat.") as (gateway, opened, client, engine):
        options: Any = {"model": "policy", "max_tokens": 100, "messages": [USER], "tools": [look], "stream": streamed}
        async for said in client.beta.messages.tool_runner(**options):
            turn = await said.get_final_message() if streamed else said
        assert turn.content[0].text == "A cat."
        assert "saw 1\n</tool_response>\n<tool_response>\nsaw 2" in tokenizer.decode(engine.requests[1].input_ids)
        with pytest.raises(anthropic.BadRequestError, match="send the whole conversation without it") as refused:
            await client.beta.messages.create(**{**options, "stream": False, "tools": []}, thread={"type": "create"})
        assert refused.value.error_code == "thread_unsupported_request"
        assert (await gateway.close(opened, reward=1.0)).body["branches"] == 1


def test_tools_of_anthropics_servers_and_its_billing_line_do_not_reach_the_model() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1", "You help.", "Briefly.")]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    chat, _ = read_request({"system": system, "messages": [USER], "tools": [hosted, *TOOLS]})
    assert chat["messages"][0] == {"role": "system", "content": "You help.\nBriefly."}
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["look"]


# --- any conversation ------------------------------------------------------------------------------------------------

TEXT = st.text("ab \n", min_size=1, max_size=5)
PART = st.one_of(TEXT.map(lambda text: {"type": "text", "text": text}), st.just(PICTURE))
NAME = st.sampled_from(["look", "tap"])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chat messages whose parts are Anthropic's blocks: rounds of a user, an assistant with calls, and their results
    in any order."""
    found: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 3))
        calls = [
            {"id": f"call_{number}_{at}", "function": {"name": draw(NAME), "arguments": {"at": at}}}
            for at in range(count)
        ]
        said: dict[str, Any] = {"role": "assistant", "content": draw(TEXT), "tool_calls": calls}
        if draw(st.booleans()):
            said["reasoning_content"] = draw(TEXT)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": draw(st.lists(PART, min_size=1, max_size=2))}
            for call in draw(st.permutations(calls))
        ]
        asking = {"role": "user", "content": draw(st.lists(PART, min_size=1, max_size=3))}
        found += [asking, said, *results]
    return [*found, {"role": "user", "content": [{"type": "text", "text": "end"}]}]


def in_anthropics_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client of Anthropic sends for chat messages: what comes between two replies is one message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            thoughts = [message[key] for key in ("reasoning_content",) if key in message]
            blocks = [{"type": "thinking", "thinking": thought, "signature": "s"} for thought in thoughts]
            blocks.append({"type": "text", "text": message["content"]})
            for call in message["tool_calls"]:
                function = call["function"]
                blocks.append(
                    {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
                )
            found.append({"role": "assistant", "content": blocks})
            continue
        if not found or found[-1]["role"] == "assistant":
            found.append({"role": "user", "content": []})
        named = message.get("tool_call_id")
        result = {"type": "tool_result", "tool_use_id": named, "content": message["content"]}
        found[-1]["content"] += message["content"] if named is None else [result]
    return found


def in_chat_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = {"type": "image_url", "image_url": {"url": f"sha256:{PNG_HASH}"}}
    return [
        message
        if message["role"] == "assistant"
        else {**message, "content": [shown if part is PICTURE else part for part in message["content"]]}
        for message in messages
    ]


@examples(100)
@given(conversations())
def test_any_conversation_is_read_as_it_was_held(messages: list[dict[str, Any]]) -> None:
    chat, images = read_request({"messages": in_anthropics_form(messages)})
    assert read_conversation(chat["messages"]) == read_conversation(in_chat_form(messages))
    assert set(images) <= {PNG_HASH}
