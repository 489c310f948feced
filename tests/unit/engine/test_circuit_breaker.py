"""A job whose engine is away, or breaks every attempt: it pauses with a reason, and goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine import circuit_breaker
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.runner import job_runner
from slime_plugins.rollout_buffer.runner.engine_watch import EngineWatch
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.storage.tables.job_rows import update_job
from slime_plugins.rollout_buffer.types import EpisodeRequest, JobState, SamplingParams, Trajectory
from tests.engine_contracts import answering, http_answer
from tests.unit.runner.test_runner import ScriptedGenerator, plugin_of, start, trajectory_for
from tests.waiting import until

PAGE = http_answer(404, b"<html>no such page</html>", "text/html")
REFUSAL = http_answer(400, b'{"error": {"message": "weights are broken"}}')
ONE_TOKEN = http_answer(
    200,
    b'{"output_ids": [7], "meta_info": {"finish_reason": {"type": "length"}, '
    b'"output_token_logprobs": [[-0.5, 7, null]]}}',
)


class SamplingGenerator(ScriptedGenerator):
    """Samples some tokens of the job's engine for each episode."""

    def __init__(self, max_new_tokens: int = 1) -> None:
        super().__init__(self._ask)
        self._sampling = SamplingParams(max_new_tokens=max_new_tokens)

    async def start(self, context: GeneratorContext) -> None:
        self._engine = context.engine

    async def _ask(self, episode: EpisodeRequest) -> Trajectory:
        request = GenerateRequest(input_ids=(1, 2), sampling_params=self._sampling, session_id=episode.uid)
        await self._engine.generate(request)
        return trajectory_for(episode, float(episode.slot % 2))


@pytest.fixture
def buffer(real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> Buffer:
    """A buffer on the real clock, and a quick runner whose patience with its engine is short."""
    monkeypatch.setattr(circuit_breaker, "AWAY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(circuit_breaker, "PROBE_INTERVAL_S", 0.05)
    short = EngineSettings(retry_timeout_s=0.5, backoff_first_s=0.02, backoff_longest_s=0.05)
    monkeypatch.setattr(job_runner, "make_engine", lambda url, **options: make_engine(url, short, **options))
    return real_time_buffer


class OneAnswer:
    """Answers every request with ``answer``, as a proxy before an engine does; counts the requests."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked = 0

    def __call__(self, _: bytes) -> bytes:
        self.asked += 1
        return self.answer


@asynccontextmanager
async def playing(buffer: Buffer, engine: OneAnswer, **changes: Any) -> AsyncIterator[Any]:
    """A job that is being played; yields it and its runner's task."""
    async with answering(engine) as url:
        job = start(buffer, **{"count": 8, "remote_engine_url": url, **changes})
        running = asyncio.create_task(
            JobRunner(buffer, job.key, plugin_of(SamplingGenerator()), buffer_url="http://127.0.0.1:9").run()
        )
        try:
            yield job, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until_state(buffer: Buffer, job: Any, state: JobState) -> Any:
    await until(lambda: buffer.job_by_key(job.key).state is state)
    return buffer.job_by_key(job.key)


async def test_an_engine_behind_a_proxys_page_pauses_the_job_and_costs_no_attempt(buffer: Buffer) -> None:
    engine = OneAnswer(PAGE)
    async with playing(buffer, engine) as (job, running):
        paused = await until_state(buffer, job, JobState.PAUSED)
        assert paused.cause_code is CauseCode.ENGINE_AWAY
        assert "answers HTTP 404, not as an engine does: <html>no such page</html>" in paused.cause
        told = Views(buffer.store, "supervisor").explanation(job.job_id)["explanation"]
        assert "paused_engine" in [one.code for one in told]
        await asyncio.sleep(1.5)  # longer than a turn's patience: what was under way is given up
        described = describe_job(buffer.store, job)
        assert described["attempts"].get("failed", 0) == 0
        assert described["groups"].get("failed", 0) == 0
        engine.answer = ONE_TOKEN
        await asyncio.wait_for(running, 50)
    described = describe_job(buffer.store, job)
    assert (described["state"], described["slots"]["ready"]) == ("finished", 16)
    assert described["attempts"]["finished"] == 16
    assert "failed" not in described["attempts"]


@pytest.mark.parametrize("answer", [http_answer(503, b"loading", "text/plain"), PAGE])
async def test_an_engine_whose_prompts_must_be_probed_and_that_nobody_reaches_pauses_the_job(
    buffer: Buffer, answer: bytes
) -> None:
    engine = OneAnswer(answer)
    exact = {"exact_prompts": "require", "tokenizer_path": str(DEMO_TOKENIZER_PATH)}
    async with playing(buffer, engine, **exact) as (job, running):
        assert (await until_state(buffer, job, JobState.PAUSED)).cause_code is CauseCode.ENGINE_AWAY
        engine.answer = ONE_TOKEN
        await asyncio.wait_for(running, 50)
    assert "does not report the ids it ran" in buffer.job_by_key(job.key).cause


async def test_an_engine_that_fails_every_attempt_pauses_the_job_instead_of_burning_its_input(buffer: Buffer) -> None:
    engine = OneAnswer(REFUSAL)
    async with playing(buffer, engine, count=200, num_process=4) as (job, running):
        paused = await until_state(buffer, job, JobState.PAUSED)
        assert "fails every attempt: the engine refused the request: weights are broken" in paused.cause
        asked = engine.asked
        await asyncio.sleep(0.5)
        described = describe_job(buffer.store, job)
        assert described["groups"]["open"] >= 180
        assert engine.asked - asked < 30, "one question now and then is all that is asked of it"
        engine.answer = ONE_TOKEN
        await asyncio.wait_for(running, 50)
    assert describe_job(buffer.store, job)["slots"]["ready"] >= 2 * 180


async def test_an_engine_that_refuses_every_question_for_long_fails_the_job(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, and says no to everything: nobody would ever wake the job."""
    monkeypatch.setattr(circuit_breaker, "REFUSED_TIMEOUT_S", 0.3)
    async with playing(buffer, OneAnswer(REFUSAL), count=200, num_process=4) as (job, running):
        await asyncio.wait_for(running, 50)
    described = describe_job(buffer.store, job)
    assert described["state"] == "failed"
    assert described["cause"].startswith("the engine refuses every request, even a probe of one token, for ")
    assert described["cause"].endswith("the engine refused the request: weights are broken")
    assert described["groups"]["open"] >= 180, "what was never played can be played when the job is started again"


async def test_an_engine_that_nobody_reaches_is_waited_for_without_end(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "REFUSED_TIMEOUT_S", 0.0)
    async with playing(buffer, OneAnswer(PAGE), num_process=2) as (job, _):
        await until_state(buffer, job, JobState.PAUSED)
        await asyncio.sleep(0.4)
        assert buffer.job_by_key(job.key).state is JobState.PAUSED


async def test_requests_that_are_wrong_by_themselves_fail_their_job(buffer: Buffer) -> None:
    """The engine refuses each of them and answers everybody else: nothing to wait for, and nothing to play on for."""

    def answer(body: bytes) -> bytes:
        return ONE_TOKEN if b'"max_new_tokens":1,' in body or b'"max_new_tokens":1}' in body else REFUSAL

    async with answering(answer) as url:
        job = start(buffer, count=20, remote_engine_url=url, max_attempts=2)
        runner = JobRunner(
            buffer, job.key, plugin_of(SamplingGenerator(max_new_tokens=2)), buffer_url="http://127.0.0.1:9"
        )
        await asyncio.wait_for(runner.run(), 50)
    described = describe_job(buffer.store, job)
    assert described["state"] == "failed"
    assert "weights are broken" in described["cause"]


async def test_a_runner_that_begins_while_the_job_waits_for_its_engine_lets_it_go_on(buffer: Buffer) -> None:
    engine = OneAnswer(PAGE)
    async with playing(buffer, engine) as (job, _):
        await until_state(buffer, job, JobState.PAUSED)
    engine.answer = ONE_TOKEN
    async with answering(engine) as url:
        with buffer.store.write() as connection:
            update_job(connection, job.key, engine_url=url)
        again = JobRunner(buffer, job.key, plugin_of(SamplingGenerator()), buffer_url="http://127.0.0.1:9")
        await asyncio.wait_for(again.run(), 50)
    assert describe_job(buffer.store, job)["slots"]["ready"] == 16


async def test_findings_on_prompts_whose_write_was_cancelled_are_stored_at_the_end() -> None:
    found, storing = [], asyncio.Event()

    async def call_store(_: Any, *arguments: Any) -> None:
        if not storing.is_set():
            storing.set()
            await asyncio.Event().wait()
        found.append(arguments[-1])

    engine = AsyncMock(fidelity=SimpleNamespace(findings=("drops the system prompt",)))
    watch = EngineWatch(Mock(call_store=call_store), engine)
    refreshing = asyncio.create_task(watch._keep_prompt_findings())
    await storing.wait()
    refreshing.cancel()
    await asyncio.gather(refreshing, return_exceptions=True)
    await watch.close()
    assert found == [("drops the system prompt",)]
