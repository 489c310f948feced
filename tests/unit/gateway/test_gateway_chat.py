"""The gateway as an agent meets it: the official client, plain HTTP, and what is recorded of both."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody, read_chat_body
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import USER, GatewayUnderTest, gateway_on, start_session_job, tokenizer

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"in": value}
    return value


def called_with(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


class Script:
    """What the engine says next; tests fill it."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.engine = FakeEngine(self._next, tokenizer=tokenizer)

    def say(self, *replies: Any) -> None:
        self.replies += replies

    def _next(self, request: GenerateRequest) -> Any:
        return self.replies.pop(0) if self.replies else f"answer {len(self.engine.requests)}"

    @property
    def requests(self) -> list[GenerateRequest]:
        return self.engine.requests


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def gateway(tmp_path: Path, script: Script) -> AsyncIterator[GatewayUnderTest]:
    async with gateway_on(tmp_path, script.engine) as found:
        yield found


# --- images ----------------------------------------------------------------------------------------------------------


async def test_an_image_by_address_or_of_an_unknown_hash_is_refused(gateway: GatewayUnderTest, script: Script) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer))
    for url, status in (
        ("http://example.com/a.png", 400),
        ("data:image/png;base64,AAAA", 400),
        ("sha256:" + "0" * 64, 404),
    ):
        shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        assert (await gateway.chat(opened, [shown])).status == status
    assert script.requests == []


def test_null_is_a_field_that_is_not_given() -> None:
    nulls = {**dict.fromkeys(ChatBody.model_fields), "stream_options": {"include_usage": None}}
    assert read_chat_body(nulls, {}) == read_chat_body({"stream_options": {}}, {})


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER], "n": 2}, "n"),
        ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [USER], "temperature": "hot"}, "temperature"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "stop": ["x"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, "1 image placeholders for 0 images"),
        ({"messages": [USER], "functions": []}, "functions"),
        ({"messages": [USER], "tools": [{"function": nested(250)}]}, "nested more than 100"),
        ({"messages": [USER], "tools": [*TOOLS, {"type": "custom", "custom": {"name": "x"}}]}, "tools: number 1"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools: number 0"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": 5}}]}, "tools: number 0"),
        ({"messages": [USER], "tools": [{"function": {"name": "x", "parameters": "none"}}]}, "tools: number 0"),
        ({"messages": [USER, called_with(nested(300))]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
async def test_wrong_requests_are_refused_in_openais_form(
    gateway: GatewayUnderTest, script: Script, body: dict[str, Any], param: str
) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer))
    reply = await gateway.call("POST", f"/sessions/{opened['api_key']}/v1/chat/completions", body)
    assert reply.status == 400
    error = reply.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param or param in error["message"]
    assert script.requests == []


async def test_a_template_option_that_a_tokenizers_own_method_names_may_be_sent(tmp_path: Path, script: Script) -> None:
    """Kimi's tokenizer has ``thinking`` in the signature of its ``apply_chat_template``."""

    class KimiTokenizer(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, thinking: bool = True, **more: Any) -> Any:
            return f"{'deep' if thinking else 'brief'} {super().apply_chat_template(messages, **more)}"

    own = copy.copy(tokenizer)
    own.__class__ = KimiTokenizer
    async with gateway_on(tmp_path, script.engine, load=lambda path: own) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        for name, status in (("thinking", 200), ("tokenize", 400), ("documents", 400)):
            body = {"messages": [USER], "chat_template_kwargs": {name: False}}
            reply = await gateway.call("POST", f"/sessions/{opened['api_key']}/v1/chat/completions", body)
            assert reply.status == status
    assert tokenizer.decode(script.requests[0].input_ids).startswith("brief ")


async def test_rubbish_is_answered_in_the_form_of_the_route_and_logs_no_traceback(
    gateway: GatewayUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = await gateway.call("POST", "/v1/messages/batches", {})
    assert (nowhere.status, nowhere.body["error"]["type"]) == (404, "not_found_error")
    expecting = await gateway.call("POST", "/v1/messages", {}, headers={"Expect": "miracles"})
    assert (expecting.status, expecting.body["error"]["type"]) == (401, "authentication_error")
    waiting = await gateway.call("POST", "/v1/messages", {}, headers={"Expect": "100-continue"})
    assert (waiting.status, waiting.body) == (expecting.status, expecting.body)
    assert (await gateway.call("BREW", "/v1/messages")).status == 400
    for levels in (100, 500, 1000, 5000):
        assert (await gateway.call("POST", "/v1/messages", b"[" * levels)).status == 400
    assert [record.message for record in caplog.records if record.exc_info] == []


async def test_a_compressed_body_is_refused_and_not_unpacked(
    gateway: GatewayUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await gateway.call("POST", "/v1/responses", b"no gzip at all", headers={"Content-Encoding": "gzip"})
    assert (reply.status, reply.body["error"]["code"]) == (415, "unsupported_encoding")
    assert [record.message for record in caplog.records if record.exc_info] == []


async def test_what_the_engine_refuses_is_the_requests_fault_and_its_absence_is_not(
    gateway: GatewayUnderTest, script: Script
) -> None:
    import openai

    opened = await gateway.open(start_session_job(gateway.buffer))
    script.say(EngineError("the engine refused the request: too long", {"status": 400}), EngineError("out of reach"))
    client = gateway.client(opened)
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.chat.completions.create(model="p", messages=[USER])
    with pytest.raises(openai.InternalServerError, match="out of reach"):
        await client.chat.completions.create(model="p", messages=[USER])


# --- how it samples --------------------------------------------------------------------------------------------------


async def test_the_clients_sampling_parameters_override_the_jobs_up_to_the_jobs_cap(
    gateway: GatewayUnderTest, script: Script
) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer, sampling_params={"top_p": 0.9, "max_tokens": 50}))
    await gateway.chat(opened, [USER], temperature=0.25, max_tokens=1000, seed=7, stop="END", top_k=5)
    params = script.requests[0].sampling_params
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.25, 0.9, 50)
    assert params.extra == {"sampling_seed": 7, "stop": ["END"], "top_k": 5}


async def test_pinned_sampling_is_the_jobs(gateway: GatewayUnderTest, script: Script) -> None:
    job = start_session_job(gateway.buffer, sampling_params={"temperature": 0.8}, pin_sampling_params=True)
    opened = await gateway.open(job)
    await gateway.chat(opened, [USER], temperature=0, top_p=0.1, seed=7, stop="END", max_tokens=5)
    params = script.requests[0].sampling_params
    assert (params.temperature, params.top_p, params.max_new_tokens) == (0.8, 1.0, 5)
    assert params.extra == {"stop": ["END"]}


async def test_a_stream_ends_with_the_usage_of_a_plain_answer_if_it_is_asked_for(
    gateway: GatewayUnderTest, script: Script
) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer))
    script.say("Four.", "Four.")
    client = gateway.client(opened)
    plain = await client.chat.completions.create(model="policy", messages=[USER])
    stream = await client.chat.completions.create(
        model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == len(script.requests[0].input_ids)
    assert (last.choices, last.usage) == ([], plain.usage)
    assert all(chunk.usage is None for chunk in chunks)


async def test_text_ends_before_a_stop_sequence_and_the_ids_do_not(gateway: GatewayUnderTest, script: Script) -> None:
    job = start_session_job(gateway.buffer, n=1)
    opened = await gateway.open(job)
    ids = tuple(tokenizer.encode("The sum is 4 END", add_special_tokens=False))
    script.say(GenerateReply(output_ids=ids, output_log_probs=(-1.0,) * len(ids), finish_reason="stop"))
    first = await gateway.chat(opened, [USER], stop=["END"])
    message = first.body["choices"][0]["message"]
    assert message["content"] == "The sum is 4 "
    await gateway.chat(opened, [USER, {**message, "content": "The sum is 4"}, USER])
    assert list(script.requests[1].input_ids)[len(script.requests[0].input_ids) :][: len(ids)] == list(ids)
