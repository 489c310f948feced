"""The conformance suite of ``Engine``, as tests to inherit.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def engine(self): ...

Nothing here imports pytest; the methods are plain coroutines that assert.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.types import SamplingParams, WeightVersionSpan


class EngineContract:
    """Behaviour that an episode relies on. ``prompt_ids`` is a prompt whose reply has more than two tokens."""

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


def assert_spans_cover(reply: GenerateReply) -> None:
    """Every sampled token has exactly one weight version; neighbouring spans differ in it."""
    spans: Sequence[WeightVersionSpan] = reply.weight_version_spans
    assert spans[0].start == 0
    assert spans[-1].end == len(reply.output_ids)
    for earlier, later in itertools.pairwise(spans):
        assert earlier.end == later.start
        assert earlier.weight_version != later.weight_version
