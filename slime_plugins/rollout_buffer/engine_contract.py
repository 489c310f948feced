"""The promises that every ``Engine`` keeps, as tests to inherit.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def engine(self): ...

``EngineContract`` holds for any engine; ``SglangServerContract`` for the client together with a server that speaks
SGLang's HTTP, ``VisionContract`` where that server also sees. The fake, the stand-in and a real SGLang pass them.
Nothing here imports pytest; the methods are plain coroutines that assert.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import aiohttp

from slime_plugins.rollout_buffer.engine import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import Image, SamplingParams, WeightVersionSpan

__all__ = ["EngineContract", "SglangServerContract", "VisionContract"]

WAIT_S = 60.0


class EngineContract:
    """What an episode may rely on. ``prompt_ids`` is a prompt that the engine has more than two tokens to say to."""

    prompt_ids: ClassVar[Sequence[int]]
    max_new_tokens: ClassVar[int] = 24

    def request(self, max_new_tokens: int | None = None, session_id: str = "contract", **extra: Any) -> GenerateRequest:
        """A turn to sample after ``prompt_ids``."""
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        params = SamplingParams(max_new_tokens=most, temperature=1.0, extra=extra)
        return GenerateRequest(input_ids=self.prompt_ids, sampling_params=params, session_id=session_id)

    async def test_each_sampled_id_has_a_log_prob(self, engine: Engine) -> None:
        reply = await engine.generate(self.request())
        assert 0 < len(reply.output_ids) <= self.max_new_tokens
        assert len(reply.output_log_probs) == len(reply.output_ids)
        assert all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in reply.output_log_probs)
        assert all(type(token_id) is int and token_id >= 0 for token_id in reply.output_ids)

    async def test_a_turn_ends_by_itself_or_at_its_cap(self, engine: Engine) -> None:
        reply = await engine.generate(self.request())
        assert reply.finish_reason in ("stop", "length")
        assert reply.finish_reason == "stop" or len(reply.output_ids) == self.max_new_tokens

    async def test_the_cap_is_kept(self, engine: Engine) -> None:
        reply = await engine.generate(self.request(max_new_tokens=2))
        assert (len(reply.output_ids), reply.finish_reason) == (2, "length")

    async def test_a_cap_of_zero_samples_nothing(self, engine: Engine) -> None:
        reply = await engine.generate(self.request(max_new_tokens=0))
        assert (reply.output_ids, reply.output_log_probs, reply.finish_reason) == ((), (), "length")

    async def test_weight_versions_cover_the_output(self, engine: Engine) -> None:
        reply = await engine.generate(self.request())
        assert_spans_cover(reply)
        assert reply.weight_version == reply.weight_version_spans[-1].weight_version

    async def test_the_prompt_is_counted(self, engine: Engine) -> None:
        reply = await engine.generate(self.request())
        assert reply.prompt_tokens == len(self.prompt_ids)

    async def test_sessions_run_side_by_side(self, engine: Engine) -> None:
        requests = [self.request(max_new_tokens=4, session_id=f"contract/{number}") for number in range(8)]
        replies = await asyncio.gather(*map(engine.generate, requests))
        assert all(reply.output_ids for reply in replies)

    async def test_a_cancelled_turn_harms_no_other(self, engine: Engine) -> None:
        given_up = asyncio.create_task(engine.generate(self.request(session_id="contract/given up")))
        await asyncio.sleep(0)
        given_up.cancel()
        reply = await engine.generate(self.request())
        assert reply.output_ids
        await asyncio.wait({given_up})

    async def test_closing_twice_does_nothing(self, engine: Engine) -> None:
        await engine.close()
        await engine.close()


class SglangServerContract(EngineContract):
    """What the client promises together with an SGLang server at ``base_url``; ``long`` tokens take it a second."""

    long: ClassVar[int] = 200

    def long_request(self) -> GenerateRequest:
        """A turn that lasts long enough to be disturbed, and ends at its cap only."""
        return self.request(max_new_tokens=self.long, ignore_eos=True)

    async def disturbed(self, engine: Engine, base_url: str, request: GenerateRequest) -> GenerateReply:
        """The reply to ``request``, which was aborted on its way."""
        turn = asyncio.create_task(engine.generate(request))
        await until_running(base_url)
        assert not turn.done()
        await post(base_url, "abort_request", {"abort_all": True})
        return await asyncio.wait_for(turn, WAIT_S)

    async def test_a_turn_goes_on_after_an_update_of_the_weights(self, engine: Engine, base_url: str) -> None:
        """The trainer's order: pause (which aborts what runs), new weights, continue."""
        await post(base_url, "update_weight_version", {"new_version": "41"})
        turn = asyncio.create_task(engine.generate(self.long_request()))
        await until_running(base_url)
        await post(base_url, "pause_generation", {})
        await post(base_url, "update_weight_version", {"new_version": "42"})
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert (len(reply.output_ids), reply.finish_reason) == (self.long, "length")
        assert_spans_cover(reply)
        assert [span.weight_version for span in reply.weight_version_spans] == ["41", "42"]
        assert reply.prompt_tokens == len(self.prompt_ids)

    async def test_an_aborted_turn_is_resumed(self, engine: Engine, base_url: str) -> None:
        reply = await self.disturbed(engine, base_url, self.long_request())
        assert (len(reply.output_ids), len(reply.output_log_probs)) == (self.long, self.long)
        assert reply.finish_reason == "length"

    async def test_a_turn_frozen_in_place_goes_on_as_one_call(self, engine: Engine, base_url: str) -> None:
        turn = asyncio.create_task(engine.generate(self.long_request()))
        await until_running(base_url)
        await post(base_url, "pause_generation", {"mode": "in_place"})
        await asyncio.sleep(0.2)
        assert not turn.done()
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert (len(reply.output_ids), reply.finish_reason) == (self.long, "length")

    async def test_a_turn_sent_to_a_paused_engine_waits(self, engine: Engine, base_url: str) -> None:
        await post(base_url, "pause_generation", {})
        turn = asyncio.create_task(engine.generate(self.request()))
        await asyncio.sleep(0.3)
        assert not turn.done()
        await post(base_url, "update_weight_version", {"new_version": "43"})
        await post(base_url, "continue_generation", {})
        reply = await asyncio.wait_for(turn, WAIT_S)
        assert reply.weight_version == "43"

    async def test_a_cancelled_turn_leaves_the_engine_idle(self, engine: Engine, base_url: str) -> None:
        turn = asyncio.create_task(engine.generate(self.request(max_new_tokens=20 * self.long, ignore_eos=True)))
        await until_running(base_url)
        turn.cancel()
        await asyncio.wait({turn})
        await until(base_url, lambda load: load == 0)

    async def test_a_wrong_request_is_refused_in_the_engines_words(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.request(max_length=3)), "unknown field `max_length`")

    async def test_a_prompt_beyond_the_context_is_refused(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.request(max_new_tokens=10_000_000)), "maximum context length")

    async def test_a_second_turn_finds_its_prefix_cached(self, engine: Engine) -> None:
        first = await engine.generate(self.request(session_id="contract/cached"))
        longer = [*self.prompt_ids, *first.output_ids, *self.prompt_ids]
        second = await engine.generate(replace(self.request(session_id="contract/cached"), input_ids=longer))
        assert second.prompt_tokens == len(longer)
        assert second.cached_tokens is not None
        assert second.cached_tokens >= len(self.prompt_ids)


class VisionContract:
    """What holds for a server that sees. ``image_prompt_ids`` hold two placeholders, for ``images``, 64x128 and 128x64.

    Each of those images takes 72 tokens in the way Qwen3-VL counts.
    """

    image_prompt_ids: ClassVar[Sequence[int]]
    images: ClassVar[tuple[Image, Image]]
    image_tokens: ClassVar[int] = 72

    def image_request(self, images: Sequence[Image]) -> GenerateRequest:
        """A turn after a prompt with two image placeholders."""
        params = SamplingParams(max_new_tokens=8, temperature=1.0)
        return GenerateRequest(
            input_ids=self.image_prompt_ids, sampling_params=params, session_id="contract/images", images=images
        )

    async def test_each_image_is_expanded_at_its_placeholder(self, engine: Engine) -> None:
        reply = await engine.generate(self.image_request(self.images))
        assert reply.prompt_tokens == len(self.image_prompt_ids) + 2 * (self.image_tokens - 1)
        assert reply.output_ids

    async def test_a_missing_image_is_an_engine_error(self, engine: Engine) -> None:
        await assert_refused(engine.generate(self.image_request(self.images[:1])), "HTTP 500")

    async def test_bytes_that_are_no_image_are_refused(self, engine: Engine) -> None:
        broken = (self.images[0], Image(data=b"no picture"))
        await assert_refused(engine.generate(self.image_request(broken)), "Could not decode image")


def assert_spans_cover(reply: GenerateReply) -> None:
    """Every sampled token has exactly one weight version; neighbouring spans differ in it."""
    spans: Sequence[WeightVersionSpan] = reply.weight_version_spans
    assert spans[0].start == 0
    assert spans[-1].end == len(reply.output_ids)
    for earlier, later in itertools.pairwise(spans):
        assert earlier.end == later.start
        assert earlier.weight_version != later.weight_version


async def assert_refused(turn: Awaitable[GenerateReply], sentence: str) -> None:
    """The turn ends in an ``EngineError`` that says ``sentence``."""
    (outcome,) = await asyncio.gather(turn, return_exceptions=True)
    assert isinstance(outcome, EngineError), f"the engine did not refuse: {outcome!r}"
    assert sentence in outcome.message, outcome.message


async def post(base_url: str, route: str, body: dict[str, Any]) -> None:
    """Tells the server what a trainer tells it."""
    async with aiohttp.ClientSession() as session, session.post(f"{base_url}/{route}", json=body) as response:
        assert response.status == 200, await response.text()


async def until_running(base_url: str) -> None:
    """Waits until the server works on something, and a moment longer, so that there is output to lose."""
    await until(base_url, lambda load: load > 0)
    await asyncio.sleep(0.3)


async def until(base_url: str, is_so: Callable[[int], bool]) -> None:
    """Waits for a number of running requests."""
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
        while not is_so(await _running_requests(session, base_url)):  # noqa: ASYNC110 - a server is watched
            await asyncio.sleep(0.05)


async def _running_requests(session: aiohttp.ClientSession, base_url: str) -> int:
    async with session.get(f"{base_url}/v1/loads?include=core") as response:
        loads = (await response.json())["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
