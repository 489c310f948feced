"""A gateway's engine that is gone or fails: what people are told of it, and that its sessions earn nothing by it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.engine import circuit_breaker
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineAwayError, EngineError, UnavailableError
from slime_plugins.rollout_buffer.gateway.backends import JobBackends
from slime_plugins.rollout_buffer.gateway.service import Gateway
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.rules.heartbeats import ENGINE, PROMPTS, SUPERVISOR, Service
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble
from slime_plugins.rollout_buffer.wire.job_replies import JobExplanation
from tests.gateway_support import USER, GatewayUnderTest, age_sessions, gateway_on, start_session_job, tokenizer
from tests.support import slot_counts
from tests.waiting import until

TROUBLE = EngineReport(url="http://e", code=EngineTrouble.REFUSES, message="cannot be reached", since_s=1.0, waiting=1)
PATIENT = EngineSettings(retry_timeout_s=600.0, backoff_first_s=0.01, backoff_longest_s=0.02)


@pytest.fixture(autouse=True)
def _nothing_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "ENGINE", replace(ENGINE, beats_every_s=0.0))
    monkeypatch.setattr(circuit_breaker, "PROBE_INTERVAL_S", 0.0)


@asynccontextmanager
async def engine_at(port: int) -> AsyncIterator[None]:
    """An engine that answers every turn with one token."""

    async def generate(_: web.Request) -> web.Response:
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 500, None]]}
        return web.json_response({"output_ids": [500], "meta_info": meta})

    application = web.Application()
    application.router.add_post("/generate", generate)
    async with TestServer(application, port=port):
        yield


@dataclass(frozen=True, slots=True)
class Told:
    """A gateway's job and what people are told of it."""

    gateway: GatewayUnderTest
    job: JobRecord

    async def until(self, code: str) -> JobExplanation:
        """Waits until the most pressing sentence has this code, and returns all that is told."""
        views = Views(self.gateway.buffer.store, SUPERVISOR.name)
        async with asyncio.timeout(60):
            while True:
                self.gateway.buffer.beat(SUPERVISOR.name, os.getpid(), {})
                await self.gateway.gateway.reconcile()
                found = views.explanation(self.job.job_id)
                if found["explanation"][0].code == code:
                    return found
                await asyncio.sleep(0.01)


async def test_the_engine_is_named_while_agents_wait_after_they_gave_up_and_until_it_is_back(tmp_path: Path) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    async with gateway_on(tmp_path, lambda _: SglangEngine(url, PATIENT)) as gateway:
        told = Told(gateway, start_session_job(gateway.buffer, remote_engine_url=url))
        async with engine_at(port):
            opened = await gateway.open(told.job)
            assert (await gateway.chat(opened, [USER])).status == 200
            assert (await told.until("playing"))["engine"] == {}

        asking = asyncio.create_task(gateway.chat(opened, [USER]))
        waits = await told.until("no_engine")
        assert f"The engine at {url} cannot be reached" in waits["explanation"][0].message
        assert "1 request is held" in waits["explanation"][0].message
        assert "playing" not in [one.code for one in waits["explanation"]]

        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while (await told.until("no_engine"))["engine"]["waiting"]:
            pass
        assert f"The engine at {url} cannot be reached" in (await told.until("no_engine"))["explanation"][0].message

        async with engine_at(port):
            await told.until("playing")
            assert (await gateway.chat(opened, [USER])).status == 200


@pytest.mark.parametrize(
    ("written_by", "stored_as", "found"),
    [
        ("keep_prompt_findings", PROMPTS, {"findings": ["drops the system prompt"]}),
        ("report_engine", ENGINE, {"engine": asdict(TROUBLE)}),
    ],
)
async def test_what_is_known_of_an_engine_is_stored_later_if_its_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_by: str, stored_as: Service, found: dict[str, Any]
) -> None:
    monkeypatch.setattr(circuit_breaker, "ENGINE", ENGINE)
    engine = AsyncMock(spec=HttpEngine, fidelity=EngineFidelity(findings=("drops the system prompt",)), is_away=False)
    engine.report.return_value = TROUBLE
    store = Store(tmp_path)
    buffer = Buffer(store)
    backends = JobBackends(buffer.job_settings, lambda _, **__: engine, lambda _: tokenizer)
    gateway = Gateway(GatewaySettings(data_dir=tmp_path), buffer, backends=backends)
    job = start_session_job(buffer)
    await backends.open(job)
    with monkeypatch.context() as busy:
        busy.setattr(buffer, written_by, Mock(side_effect=UnavailableError("busy")))
        with pytest.raises(UnavailableError):
            await gateway.reconcile()
    await gateway.reconcile()
    stored = buffer.heartbeat(stored_as.of_job(job.key))
    assert stored is not None
    assert stored[1] == found
    await gateway.stop()
    store.close()


async def test_a_tokenizer_that_two_jobs_name_is_loaded_once_and_the_log_says_so_once(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    backends = JobBackends(buffer.job_settings, lambda _, **__: AsyncMock(), lambda _: tokenizer)
    for job_id in ("j", "k"):
        await backends.open(start_session_job(buffer, job_id=job_id))
    assert caplog.text.count("loading the tokenizer") == 1


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
    answering, dead = FailingEngine(), SglangEngine(url, PATIENT)
    async with gateway_on(tmp_path, lambda _: dead) as gateway:
        job = start_session_job(gateway.buffer, n=1, remote_engine_url=url)
        opened = await gateway.open(job)
        session = await gateway.gateway.registry.session(opened["session_id"])
        backend = await gateway.gateway.backends.open(session.claim.job)
        backend.engine = answering
        await gateway.chat(opened, [USER])
        backend.engine = dead

        asking = asyncio.create_task(gateway.chat(opened, [USER]))
        await until(lambda: dead.is_away)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not session.under_way)
        scored = await gateway.close(opened, reward=0)
        assert (scored.status, "cannot be reached" in scored.body["error"]["message"]) == (409, True)
        assert slot_counts(gateway.buffer, job)["ready"] == 0


@pytest.mark.parametrize(("failure", "attempts"), zip(FAILURES, (1, 2), strict=True))
@pytest.mark.parametrize("expires", [False, True])
async def test_a_session_that_ends_because_its_engine_is_away_does_not_count_towards_max_attempts(
    tmp_path: Path, failure: EngineError, attempts: int, expires: bool
) -> None:
    engine = FailingEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        job = start_session_job(gateway.buffer, n=1, max_attempts=attempts)
        opened = await gateway.open(job, idle_timeout_s=60)
        engine.error = failure
        await gateway.chat(opened, [USER])
        if expires:
            age_sessions(gateway, 61)
            await gateway.gateway.reconcile()
        else:
            assert (await gateway.abandon(opened)).body == (await gateway.abandon(opened)).body
        await gateway.abandon(await gateway.open(job))
        assert slot_counts(gateway.buffer, job)["failed"] == 1
