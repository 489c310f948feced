"""Watches a job's engine: follows its address, pauses the job while the engine is unreachable, reports its state.

``HttpEngine.is_away`` decides which errors mean that the engine is unreachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.engine.circuit_breaker import CircuitBreaker, ReportThrottle
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.runner.played_job import PlayedJob
from slime_plugins.rollout_buffer.types import JobState

logger = logging.getLogger(__name__)


class EngineWatch:
    """Watches the engine of one job. Attempts record their engine errors in ``breaker``."""

    def __init__(self, job: PlayedJob, engine: HttpEngine) -> None:
        self.breaker = CircuitBreaker(engine)
        self._job = job
        self._engine = engine
        self._url = job.record.engine_url
        self._reports = ReportThrottle()
        self._prompt_findings: tuple[str, ...] | None = None

    async def on_refresh(self) -> None:
        """Runs after each refresh of the job."""
        self._follow_address()
        await self._pause_or_go_on()
        await self._report()
        await self._keep_prompt_findings()

    async def complaint_of_prompts(self) -> str:
        """Waits for the engine, then returns why it does not run prompts exactly as sent; empty if it does.

        It would wait forever for an engine that can never be probed. A start with ``exact_prompts: require`` is
        therefore refused for such an engine.
        """
        while (fidelity := await self._engine.probe_prompts()) is None:
            await self._engine.answers()  # if it does not answer, the breaker pauses the job
            await asyncio.sleep(self._job.watch_interval_s)
        return fidelity.complaint

    async def close(self) -> None:
        """Stores the findings since the last refresh, then closes the breaker and the engine's client."""
        with contextlib.suppress(RolloutBufferError):
            await self._keep_prompt_findings()
        await self.breaker.close()
        await self._engine.close()

    def _follow_address(self) -> None:
        url = self._job.record.engine_url
        if url and url != self._url:
            logger.info("job %s: the engine is now at %s", self._job.record.job_id, redacted(url))
            self._engine.set_base_url(url)
            self._url = url

    async def _pause_or_go_on(self) -> None:
        """Pauses the job while its engine is unreachable, and resumes or fails it afterwards."""
        job, record = self._job, self._job.record
        if record.state is JobState.RUNNING and (trouble := self.breaker.trouble()):
            logger.warning("job %s is paused: the engine %s", record.job_id, trouble)
            await job.call_store(job.buffer.pause_for_engine, job.fence, job.key, trouble)
        elif record.state is not JobState.PAUSED or record.cause_code is not CauseCode.ENGINE_AWAY:
            return
        elif self.breaker.has_recovered():
            logger.info("job %s resumes: the engine answers again", record.job_id)
            await job.call_store(job.buffer.resume_for_engine, job.fence, job.key)
        elif verdict := self.breaker.verdict():
            logger.error("job %s fails: the engine %s", record.job_id, verdict)
            await job.fail(f"the engine {verdict}", CauseCode.ENGINE_REFUSES)
        else:
            return
        await job.refresh()

    async def _report(self) -> None:
        """Stores the engine's trouble while it lasts; a healthy engine causes no writes."""
        if self._reports.is_due(report := self._engine.report()):
            await self._job.call_store(self._job.buffer.report_engine, self._job.key, os.getpid(), report)
            self._reports.mark_stored(report)

    async def _keep_prompt_findings(self) -> None:
        """Stores the findings of the prompt probe, when they differ from those stored before."""
        job, fidelity = self._job, self._engine.fidelity
        if fidelity is not None and fidelity.findings != self._prompt_findings:
            await job.call_store(job.buffer.keep_prompt_findings, job.key, os.getpid(), fidelity.findings)
            self._prompt_findings = fidelity.findings
