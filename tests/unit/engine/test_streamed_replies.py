"""Replies of SGLang as they are streamed: put together from any bytes, and what happens when a stream breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import MAX_STREAM_BREAKS, RefusalError
from slime_plugins.rollout_buffer.engine.prompt_check import PromptChecker
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import SampledPart, StreamedReply, can_be_continued
from slime_plugins.rollout_buffer.errors import EngineAwayError, EngineError
from slime_plugins.rollout_buffer.types import PromptCheck, SamplingParams, WeightVersionSpan
from tests.example_counts import examples
from tests.virtual_time import in_virtual_time

QUICK = EngineSettings(retry_timeout_s=20.0, deadline_s=40.0, backoff_first_s=0.01, backoff_longest_s=0.02)


def reply_of(ids: Sequence[int], *, since: int = 0, finish: Any = None, version: str | None = "3") -> dict[str, Any]:
    meta = {
        "finish_reason": finish,
        "completion_tokens": len(ids),
        "weight_version": version,
        "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids[since:]],
    }
    return {"text": "", "output_ids": list(ids[since:]), "meta_info": meta}


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream_of(
    ids: Sequence[int],
    ends: Sequence[int],
    *,
    incremental: bool,
    repeats_log_probs: bool = False,
    finish: Any = None,
    version: str | None = "3",
) -> bytes:
    """The events of a reply whose first ``ends`` tokens each event tells.

    ``repeats_log_probs``: of incremental ones too, as SGLang's older ``--stream-output`` does.
    """
    content = b""
    for since, end in zip([0, *ends], ends, strict=False):
        is_last = end == len(ids)
        last = (finish or {"type": "stop"}) if is_last else None
        told = reply_of(ids[:end], since=since if incremental else 0, finish=last, version=version)
        if repeats_log_probs:
            told["meta_info"] = reply_of(ids[:end], finish=last, version=version)["meta_info"]
        content += event(told)
    return content + b"data: [DONE]\n\n"


@examples(100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.booleans(), st.booleans(), st.data())
def test_any_stream_in_any_pieces_is_the_reply_that_it_replaces(
    ids: list[int], incremental: bool, repeats_log_probs: bool, data: st.DataObject
) -> None:
    ends = sorted({*data.draw(st.lists(st.integers(1, len(ids)))), len(ids)})
    content = stream_of(ids, ends, incremental=incremental, repeats_log_probs=repeats_log_probs)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)))))
    told: list[int] = []
    stream = StreamedReply(told.extend, SamplingParams(max_new_tokens=12, temperature=1.0))
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        stream.add(content[start:end])
    assert told == ids
    assert (stream.status, json.loads(stream.body())) == (200, reply_of(ids, finish={"type": "stop"}))


# --- streams that break ----------------------------------------------------------------------------------------------


NO_WORKER = event({"error": {"message": "no worker"}}) + b"data: [DONE]\n\n"


@asynccontextmanager
async def engine_that_answers(
    *answers: bytes, prompts: PromptChecker | None = None
) -> AsyncIterator[tuple[SglangEngine, list[dict[str, Any]]]]:
    """A client of a server that streams each of ``answers`` once, and breaks the connection where one has no end.

    ``NO_WORKER`` has the status of a router.
    """
    left, bodies = list(answers), list[dict[str, Any]]()

    async def generate(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if not bodies[-1].get("stream"):
            return web.json_response({"error": {"message": "not streamed"}}, status=400)
        answer = left.pop(0)
        status = 503 if answer == NO_WORKER else 200
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(answer)
        if not answer.endswith(b"[DONE]\n\n"):
            assert request.transport is not None
            request.transport.abort()
        return response

    application = web.Application()
    application.router.add_post("/generate", generate)
    async with TestServer(application) as server:
        engine = SglangEngine(str(server.make_url("")), QUICK, vocabulary_size=100, prompts=prompts)
        try:
            yield engine, bodies
        finally:
            await engine.close()


def turn(tell: Callable[[Sequence[int]], None]) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0)
    return GenerateRequest(input_ids=[1], sampling_params=sampling, session_id="a", on_tokens=tell)


async def heard_before_failing(*answers: bytes, **extra: Any) -> tuple[list[int], str, int]:
    """The ids that came, why the turn failed, and how often the engine was asked."""
    heard: list[int] = []
    async with engine_that_answers(*answers) as (engine, bodies):
        with pytest.raises(EngineError) as failed:
            await reply_of_turn(engine, heard, **extra)
    return heard, failed.value.message, len(bodies)


async def reply_of_turn(
    engine: SglangEngine, heard: list[int], *, max_new_tokens: int = 9, **extra: Any
) -> GenerateReply:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, extra=extra)
    return await engine.generate(replace(turn(heard.extend), sampling_params=sampling))


async def reply_after(*answers: bytes, max_new_tokens: int = 9, **extra: Any) -> tuple[GenerateReply, list[Any]]:
    """The reply to a streamed turn, which is what was told of it, and the bodies of the calls."""
    heard: list[int] = []
    async with engine_that_answers(*answers) as (engine, bodies):
        reply = await reply_of_turn(engine, heard, max_new_tokens=max_new_tokens, **extra)
    assert heard == list(reply.output_ids)
    return reply, bodies


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stream_that_breaks_is_continued_after_its_last_token(incremental: bool) -> None:
    whole = stream_of([7, 8, 4], [1, 2, 3], incremental=incremental)
    broken = b"\n\n".join(whole.split(b"\n\n")[:2]) + b"\n\n"
    half_an_event = broken + b'data: {"text": "", "outp'
    rest = stream_of([9, 5, 6], [1, 3], incremental=incremental)
    reply, bodies = await reply_after(half_an_event, rest)
    assert (reply.output_ids, reply.finish_reason, reply.breaks) == ((7, 8, 9, 5, 6), "stop", 1)
    assert reply.output_log_probs == (-0.5,) * 5
    assert reply.weight_version_spans == (WeightVersionSpan("3", 0, 5),)
    assert [body["input_ids"] for body in bodies] == [[1], [1, 7, 8]]
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [9, 7]
    assert len({body["rid"] for body in bodies}) == 2


async def test_each_part_has_the_weight_version_that_sampled_it() -> None:
    reply, _ = await reply_after(event(reply_of([7])), stream_of([8], [1], incremental=False, version="4"))
    assert reply.weight_version_spans == (WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2))


async def test_the_prompt_of_a_continued_reply_is_that_of_its_first_part() -> None:
    """The engine counts, and was checked for, the prompt and the reply so far."""

    def of_prompt(reply: dict[str, Any], ran: list[int]) -> bytes:
        reply["meta_info"] |= {"prompt_tokens": len(ran), "cached_tokens": len(ran) - 1}
        return event(reply | {"prompt_token_ids": ran})

    for ran, check in (([1, 7], PromptCheck.EQUAL), ([1, 9], PromptCheck.DIFFERING)):
        rest = of_prompt(reply_of([8], finish={"type": "stop"}), ran) + b"data: [DONE]\n\n"
        reply, _ = await reply_after(of_prompt(reply_of([7]), [1]), rest)
        assert (reply.prompt_tokens, reply.cached_tokens) == (1, 0)
        assert reply.prompt_receipt is not None
        assert reply.prompt_receipt.check is check


async def test_an_error_event_breaks_a_stream_and_a_stream_may_break_more_than_once() -> None:
    full = event({"error": {"message": "the queue is full", "code": 503}}) + b"data: [DONE]\n\n"
    without_end = event(reply_of([8])) + b"data: [DONE]\n\n"
    rest = stream_of([9], [1], incremental=False)
    reply, bodies = await reply_after(event(reply_of([7])) + full, without_end, full, rest)
    assert (reply.output_ids, reply.breaks, len(bodies)) == ((7, 8, 9), 2, 4)


async def test_a_turn_that_breaks_every_stream_fails() -> None:
    broken = event(reply_of([7]))
    rest = stream_of([8], [1], incremental=False)
    reply, _ = await reply_after(*[broken] * MAX_STREAM_BREAKS, rest, max_new_tokens=20)
    assert reply.breaks == MAX_STREAM_BREAKS
    with pytest.raises(EngineError, match=f"broke off {MAX_STREAM_BREAKS + 1} streams"):
        await reply_after(*[broken] * (MAX_STREAM_BREAKS + 1), rest, max_new_tokens=20)


async def test_a_reply_whose_last_event_came_is_whole_though_its_connection_broke() -> None:
    whole = stream_of([7, 8], [1, 2], incremental=False).removesuffix(b"data: [DONE]\n\n")
    reply, _ = await reply_after(whole, stop=["x"])
    assert (reply.output_ids, reply.finish_reason, reply.breaks) == ((7, 8), "stop", 0)


@pytest.mark.parametrize(
    ("limits", "finish_reason"),
    [({"max_new_tokens": 2}, "length"), ({"stop_token_ids": [8]}, "stop")],
    ids=["its limit", "a stop token"],
)
async def test_a_broken_reply_that_reached_its_end_is_not_asked_for_again(
    limits: dict[str, Any], finish_reason: str
) -> None:
    reply, _ = await reply_after(event(reply_of([7, 8])), **limits)
    assert (reply.output_ids, reply.finish_reason, reply.breaks) == ((7, 8), finish_reason, 0)


async def test_the_end_of_the_tokenizer_ends_a_broken_reply_unless_it_is_ignored() -> None:
    tokenizer = SimpleNamespace(
        eos_token_id=8, get_added_vocab=dict, encode=lambda *_, **options: [], decode=lambda *_, **options: ""
    )
    rest = stream_of([9], [1], incremental=False)
    for ignored, output_ids in ((False, (7, 8)), (True, (7, 8, 9))):
        sampling = SamplingParams(max_new_tokens=9, extra={"ignore_eos": ignored})
        answers = (event(reply_of([7, 8])), rest)
        async with engine_that_answers(*answers, prompts=PromptChecker(tokenizer)) as (engine, _):
            reply = await engine.generate(replace(turn(lambda ids: None), sampling_params=sampling))
        assert (reply.output_ids, reply.finish_reason) == (output_ids, "stop")


async def test_the_least_number_of_tokens_counts_those_before_the_break() -> None:
    rest = stream_of([9], [1], incremental=False)
    for least, then in ((3, 1), (1, 0)):
        _, bodies = await reply_after(event(reply_of([7, 8])), rest, min_new_tokens=least)
        assert [body["sampling_params"]["min_new_tokens"] for body in bodies] == [least, then]


@pytest.mark.parametrize(
    ("extra", "is_so"),
    [
        ({"stop": ["x"]}, False),
        ({"stop_regex": "x"}, False),
        ({"json_schema": "{}"}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"n": 2}, False),
        ({"unheard_of": 1}, False),
        ({"stop": None, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1}, True),
        ({"top_k": 20, "min_p": 0.1, "sampling_seed": 5, "ignore_eos": True, "no_stop_trim": True}, True),
    ],
)
def test_a_reply_is_continued_only_if_the_engine_loses_no_state_of_it(extra: dict[str, Any], is_so: bool) -> None:
    assert can_be_continued(SamplingParams(max_new_tokens=9, extra=extra)) is is_so


@pytest.mark.parametrize(
    ("version", "extra"),
    [("4", {}), ("4", {"stop_token_ids": [8]}), ("3", {"stop": ["x"]})],
    ids=["two weight versions", "two weight versions, ended by a stop token", "stop sequences"],
)
async def test_a_broken_stream_that_cannot_be_continued_fails_the_turn(version: str, extra: dict[str, Any]) -> None:
    """Which tokens are of which version would have come with the last event."""
    heard: list[int] = []
    async with engine_that_answers(event(reply_of([7])) + event(reply_of([7, 8], version=version))) as (engine, bodies):
        with pytest.raises(EngineError, match="in the middle of a stream"):
            await reply_of_turn(engine, heard, **extra)
    assert (heard, len(bodies)) == ([7, 8], 1)


async def test_parts_with_and_without_a_weight_version_are_not_joined() -> None:
    rest = stream_of([8], [1], incremental=False, version=None)
    assert "weight version of some parts" in (await heard_before_failing(event(reply_of([7])), rest))[1]


def broken_after_a_token() -> RefusalError:
    broken = RefusalError("cannot be reached")
    broken.part = SampledPart(
        ids=(7,),
        log_probs=(-0.5,),
        finish_reason="abort",
        weight_version=None,
        spans=(),
        prompt_tokens=1,
        cached_tokens=0,
    )
    return broken


@in_virtual_time
async def test_a_turn_that_is_given_up_while_it_waits_to_be_continued_is_not_asked_for_again() -> None:
    calls = 0
    is_asked = asyncio.Event()

    class Broken(SglangEngine):
        async def _answered_part(self, request: GenerateRequest, sampled: Sequence[int]) -> SampledPart:
            nonlocal calls
            calls += 1
            is_asked.set()
            raise broken_after_a_token()

        async def answers(self) -> bool:
            return True

    turn_under_way = asyncio.ensure_future(Broken("http://broken:1", QUICK).generate(turn(lambda ids: None)))
    await is_asked.wait()
    turn_under_way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn_under_way
    await asyncio.sleep(60)
    assert calls == 1


@in_virtual_time
async def test_an_engine_that_never_comes_back_is_waited_for_as_long_after_its_last_token_as_without_one() -> None:
    class Gone(SglangEngine):
        """It answers at 15 s for the time of one token."""

        async def _answered_part(self, request: GenerateRequest, sampled: Sequence[int]) -> SampledPart:
            is_back = asyncio.get_running_loop().time() > 15 and not sampled
            raise broken_after_a_token() if is_back else RefusalError("cannot be reached")

        async def answers(self) -> bool:
            return False

    with pytest.raises(EngineAwayError, match=r"the engine at http://gone:1 cannot be reached \(\d+ tries, 20 s"):
        await Gone("http://gone:1", QUICK).generate(turn(lambda ids: None))
    assert 34 < asyncio.get_running_loop().time() < 37


async def test_a_token_outside_of_the_vocabulary_is_never_told() -> None:
    assert (await heard_before_failing(stream_of([7, 100], [1, 2], incremental=False)))[0] == [7]


async def test_a_stream_that_breaks_before_its_first_token_is_asked_for_again() -> None:
    heard: list[int] = []
    busy = event({"error": {"message": "the queue is full", "code": 503}}) + b"data: [DONE]\n\n"
    rest = stream_of([7, 8], [1, 2], incremental=False)
    async with engine_that_answers(b"", busy, NO_WORKER, rest) as (engine, bodies):
        reply = await engine.generate(turn(heard.extend))
    assert (heard, list(reply.output_ids), len(bodies)) == ([7, 8], [7, 8], 4)


@pytest.mark.parametrize("status", [{"code": 400}, {}], ids=["with its status", "without, as SGLang 0.5 sends it"])
async def test_a_refusal_in_a_stream_is_the_engines_refusal_of_the_request(status: dict[str, int]) -> None:
    refusal = event({"error": {"message": "the prompt is too long", **status}}) + b"data: [DONE]\n\n"
    heard, why, calls = await heard_before_failing(refusal)
    assert (heard, why, calls) == ([], "the engine refused the request: the prompt is too long", 1)


async def test_an_aborted_stream_goes_on_where_it_ended() -> None:
    heard: list[int] = []
    aborted = stream_of([7, 8], [1, 2], incremental=False, finish={"type": "abort"})
    async with engine_that_answers(aborted, stream_of([9], [1], incremental=False)) as (engine, bodies):
        reply: GenerateReply = await engine.generate(turn(heard.extend))
    assert (heard, list(reply.output_ids)) == ([7, 8, 9], [7, 8, 9])
    assert [body["input_ids"] for body in bodies] == [[1], [1, 7, 8]]


async def test_an_aborted_stream_whose_state_the_engine_lost_fails() -> None:
    aborted = stream_of([7, 8], [1, 2], incremental=False, finish={"type": "abort"})
    heard, why, calls = await heard_before_failing(aborted, json_schema="{}")
    assert (heard, calls) == ([7, 8], 1)
    assert why.endswith("aborted a stream that cannot be continued")


async def test_what_comes_with_the_last_token_alone_is_not_streamed() -> None:
    asked = turn(lambda ids: None)
    with_experts = replace(asked.sampling_params, extra={"return_routed_experts": True})
    async with engine_that_answers() as (engine, _):
        with pytest.raises(EngineError, match="not streamed"):
            await engine.generate(replace(asked, sampling_params=with_experts))
