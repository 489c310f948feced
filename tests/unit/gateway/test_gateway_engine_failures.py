"""A turn that the engine fails: its session earns nothing, however soon its harness scores it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineAwayError, EngineError
from tests.gateway_support import USER, gateway_on, start_session_job
from tests.support import slot_counts

FAILURES = [
    EngineAwayError("the engine at http://e cannot be reached"),
    EngineError("the engine sent 3 output ids and log-probs of 2: they do not belong together"),
]


class FailingEngine:
    """Answers, or raises what it is told."""

    def __init__(self) -> None:
        self.error: EngineError | None = None

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self.error is not None:
            raise self.error
        return GenerateReply(output_ids=(500,), output_log_probs=(-1.0,), finish_reason="stop")

    async def close(self) -> None:
        return None


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_session_whose_last_turn_the_engine_failed_has_no_reward_until_it_is_asked_again(
    tmp_path: Path, failure: EngineError
) -> None:
    engine = FailingEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        assert (await gateway.chat(opened, [USER])).status == 200
        engine.error = failure
        failed = await gateway.chat(opened, [USER])
        assert failed.status >= 500

        scored = await gateway.close(opened, reward=0)
        assert (scored.status, scored.body["error"]["code"]) == (409, "conflict")
        assert failure.message in scored.body["error"]["message"]
        assert slot_counts(gateway.buffer, job)["ready"] == 0

        engine.error = None
        assert (await gateway.chat(opened, [USER])).status == 200
        assert (await gateway.close(opened, reward=1)).body["status"] == "stored"


async def test_an_agent_that_gives_up_on_a_dead_engine_earns_nothing_by_that(tmp_path: Path) -> None:
    """Its client has a timeout of its own, which is shorter than the gateway's patience."""
    url = f"http://127.0.0.1:{unused_port()}"
    patient = EngineSettings(retry_timeout_s=600.0, backoff_first_s=0.01, backoff_longest_s=0.02)
    answering, dead = FailingEngine(), SglangEngine(url, patient)
    async with gateway_on(tmp_path, lambda _: dead) as gateway:
        job = start_session_job(gateway.buffer, n=1, remote_engine_url=url)
        opened = await gateway.open(job)
        session = await gateway.gateway.registry.session(opened["session_id"])
        backend = await gateway.gateway.backends.open(session.claim.job)
        backend.engine = answering
        await gateway.chat(opened, [USER])
        backend.engine = dead

        asking = asyncio.create_task(gateway.chat(opened, [USER]))
        while not dead.is_away:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while session.under_way:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        scored = await gateway.close(opened, reward=0)
        assert (scored.status, "cannot be reached" in scored.body["error"]["message"]) == (409, True)
        assert slot_counts(gateway.buffer, job)["ready"] == 0
