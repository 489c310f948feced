"""Replies of SGLang as they are streamed: put together from any bytes, and what happens when a stream breaks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import StreamedReply
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.example_counts import examples

QUICK = EngineSettings(retry_timeout_s=20.0, deadline_s=40.0, backoff_first_s=0.01, backoff_longest_s=0.02)


def reply_of(ids: Sequence[int], *, since: int = 0, finish: Any = None) -> dict[str, Any]:
    meta = {
        "finish_reason": finish,
        "completion_tokens": len(ids),
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids[since:]],
    }
    return {"text": "", "output_ids": list(ids[since:]), "meta_info": meta}


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream_of(ids: Sequence[int], ends: Sequence[int], *, incremental: bool, finish: Any = None) -> bytes:
    """The events of a reply whose first ``ends`` tokens each event tells."""
    content = b""
    for since, end in zip([0, *ends], ends, strict=False):
        is_last = end == len(ids)
        told = reply_of(
            ids[:end], since=since if incremental else 0, finish=(finish or {"type": "stop"}) if is_last else None
        )
        content += event(told)
    return content + b"data: [DONE]\n\n"


@examples(100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.booleans(), st.data())
def test_any_stream_in_any_pieces_is_the_reply_that_it_replaces(
    ids: list[int], incremental: bool, data: st.DataObject
) -> None:
    ends = sorted({*data.draw(st.lists(st.integers(1, len(ids)))), len(ids)})
    content = stream_of(ids, ends, incremental=incremental)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)))))
    told: list[int] = []
    stream = StreamedReply(told.extend)
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        stream.add(content[start:end])
    assert told == ids
    assert (stream.status, json.loads(stream.body())) == (200, reply_of(ids, finish={"type": "stop"}))


# --- streams that break ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine_that_answers(*answers: bytes) -> AsyncIterator[tuple[SglangEngine, list[dict[str, Any]]]]:
    """A client of a server that streams each of ``answers`` once, and breaks the connection where one has no end."""
    left, bodies = list(answers), list[dict[str, Any]]()

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if not bodies[-1].get("stream"):
            return web.json_response({"error": {"message": "not streamed"}}, status=400)
        answer = left.pop(0)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(answer)
        if not answer.endswith(b"[DONE]\n\n"):
            assert request.transport is not None
            request.transport.abort()
        return response

    application = web.Application()
    application.router.add_post("/generate", generate)
    async with TestServer(application) as server:
        engine = SglangEngine(str(server.make_url("")), QUICK, vocabulary_size=100)
        yield engine, bodies
        await engine.close()


def turn(tell: Callable[[Sequence[int]], None]) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0)
    return GenerateRequest(input_ids=[1], sampling_params=sampling, session_id="a", on_tokens=tell)


async def heard_before_failing(*answers: bytes) -> tuple[list[int], str, int]:
    """The ids that came, why the turn failed, and how often the engine was asked."""
    heard: list[int] = []
    async with engine_that_answers(*answers) as (engine, bodies):
        with pytest.raises(EngineError) as failed:
            await engine.generate(turn(heard.extend))
    return heard, failed.value.message, len(bodies)


async def test_a_stream_that_breaks_after_a_token_fails_the_turn_which_is_not_sampled_again() -> None:
    heard, why, calls = await heard_before_failing(event(reply_of([7])))
    assert (heard, calls) == ([7], 1)
    assert "in the middle of a stream" in why


async def test_an_error_event_after_a_token_fails_the_turn() -> None:
    broken = (
        event(reply_of([7])) + event({"error": {"message": "the queue is full", "code": 503}}) + b"data: [DONE]\n\n"
    )
    heard, why, calls = await heard_before_failing(broken)
    assert (heard, calls) == ([7], 1)
    assert "the queue is full" in why


async def test_a_token_outside_of_the_vocabulary_is_never_told() -> None:
    assert (await heard_before_failing(stream_of([7, 100], [1, 2], incremental=False)))[0] == [7]


async def test_a_stream_that_breaks_before_its_first_token_is_asked_for_again() -> None:
    heard: list[int] = []
    busy = event({"error": {"message": "the queue is full", "code": 503}}) + b"data: [DONE]\n\n"
    async with engine_that_answers(b"", busy, stream_of([7, 8], [1, 2], incremental=False)) as (engine, bodies):
        reply = await engine.generate(turn(heard.extend))
    assert (heard, list(reply.output_ids), len(bodies)) == ([7, 8], [7, 8], 3)


async def test_a_refusal_in_a_stream_is_the_engines_refusal_of_the_request() -> None:
    refusal = event({"error": {"message": "the prompt is too long", "code": 400}}) + b"data: [DONE]\n\n"
    heard, why, calls = await heard_before_failing(refusal)
    assert (heard, why, calls) == ([], "the engine refused the request: the prompt is too long", 1)


async def test_an_aborted_stream_goes_on_where_it_ended() -> None:
    heard: list[int] = []
    aborted = stream_of([7, 8], [1, 2], incremental=False, finish={"type": "abort"})
    async with engine_that_answers(aborted, stream_of([9], [1], incremental=False)) as (engine, bodies):
        reply: GenerateReply = await engine.generate(turn(heard.extend))
    assert (heard, list(reply.output_ids)) == ([7, 8, 9], [7, 8, 9])
    assert [body["input_ids"] for body in bodies] == [[1], [1, 7, 8]]


async def test_what_comes_with_the_last_token_alone_is_not_streamed() -> None:
    asked = turn(lambda ids: None)
    with_experts = replace(asked.sampling_params, extra={"return_routed_experts": True})
    async with engine_that_answers() as (engine, _):
        with pytest.raises(EngineError, match="not streamed"):
            await engine.generate(replace(asked, sampling_params=with_experts))
