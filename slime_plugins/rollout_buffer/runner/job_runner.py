"""Runs one job in one process: starts its generator, plays its episodes, and closes generator and engine.

``EpisodeRunner`` runs generators that play one episode per call, ``PlainRunner`` generators in slime's plain form.

After a crash the next runner takes a higher fencing number, abandons the previous runner's attempts, and continues with
the open slots.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.openai import ENVELOPE_TOKENIZER_PATH
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.observability.logs import log_fields
from slime_plugins.rollout_buffer.observability.tracebacks import place_and_traceback
from slime_plugins.rollout_buffer.observability.tracing import NoTracer, Tracer, traced_by
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, ConcurrencyState
from slime_plugins.rollout_buffer.runner.attempt_timeout import STOP_TIMEOUT_S
from slime_plugins.rollout_buffer.runner.concurrency import ConcurrencyController, ConcurrencyLimiter
from slime_plugins.rollout_buffer.runner.device_watch import DeviceWatch
from slime_plugins.rollout_buffer.runner.engine_watch import EngineWatch
from slime_plugins.rollout_buffer.runner.episode_runner import EpisodeRunner
from slime_plugins.rollout_buffer.runner.plain_runner import PlainRunner
from slime_plugins.rollout_buffer.runner.played_job import FencedError, PlayedJob
from slime_plugins.rollout_buffer.state.group_opening import planned_instances
from slime_plugins.rollout_buffer.state.runner_reports import store_concurrency, store_report
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import Instance
from slime_plugins.rollout_buffer.wire.job_settings import AUTO, JobSettings

MIN_STEP = 4
"""The smallest increase of ``num_process: auto``."""

logger = logging.getLogger(__name__)


class JobRunner:
    """Plays one job. Call ``run()`` once."""

    def __init__(
        self,
        buffer: Buffer,
        job_key: int,
        plugin: Plugin,
        *,
        buffer_url: str,
        ray_address: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """``buffer_url`` is the address to which plain generators write, ``ray_address`` the cluster with the devices.

        ``tracer`` gets a span for each attempt and its phases.
        """
        self._job = PlayedJob(buffer, job_key, plugin)
        self._plugin = plugin
        self._buffer_url = buffer_url
        self._ray_address = ray_address
        self._tracer: Tracer = tracer or NoTracer()
        self._bounds = _bounds(self._job.settings, self._job.record.group_size)

    async def run(self) -> None:
        """Plays until every group is closed or the job is over.

        A generator that cannot start fails the job; ``cause`` has the reason. Cancelling this coroutine abandons the
        running attempts; the slots stay open for the next runner. Log lines carry the job's id.
        """
        job = self._job
        with log_fields(job=job.record.job_id), traced_by(self._tracer):
            await job.begin()
            try:
                if self._plugin.create_generator is not None:
                    await self._run_generator(self._plugin.create_generator)
                elif self._plugin.run_rollout is not None:
                    await PlainRunner(job, self._buffer_url).run(self._plugin.run_rollout)
            except* FencedError:
                reason = "it was replaced, or the job is over"
                logger.warning("job %s: runner %d stops: %s", job.record.job_id, job.fence, reason)
            finally:
                job.close()

    async def _run_generator(self, create_generator: Callable[[], Generator]) -> None:
        job, engine = self._job, None
        try:
            # A chat server gets messages: its client decodes them from prompts encoded with the envelope's tokenizer.
            tokenizer_path = job.settings.tokenizer_path if job.is_exact else str(ENVELOPE_TOKENIZER_PATH)
            tokenizer = await asyncio.to_thread(load_tokenizer, tokenizer_path) if tokenizer_path else None
            engine = self._connect(tokenizer)
            engine_watch = EngineWatch(job, engine)
            generator = create_generator()
            device_watch = DeviceWatch(generator, job.record.job_id, self._keep_device_report)
            limiter = ConcurrencyLimiter(self._bounds.max_limit)
            controller = self._controller(limiter, engine, device_watch)
            watching = asyncio.create_task(_watch(device_watch, controller))
            try:
                await engine.check_records(job.settings.sampling())
                await generator.start(self._generator_context(engine, tokenizer))
            except BaseException:
                watching.cancel()
                await self._close_generator(generator)
                raise
        except Exception as error:
            # The error becomes the job's cause.
            logger.exception("job %s: the generator does not start", job.record.job_id)
            if engine is not None:
                await engine.close()
            why = place_and_traceback(error, self._plugin.source)
            await job.fail(f"the generator of {job.record.task_type} does not start: {why}")
            return
        try:
            await EpisodeRunner(job, generator, engine_watch, limiter, controller, self._tracer).run()
            await device_watch.report()
        finally:
            watching.cancel()
            await self._close_generator(generator)
            await engine_watch.close()

    def _connect(self, tokenizer: Any) -> HttpEngine:
        url, settings = str(self._job.record.engine_url), self._job.settings
        if not self._job.is_exact:
            return make_engine(url, chat_model=str(settings.engine_model), tokenizer=tokenizer)
        return make_engine(
            url,
            api=settings.engine_api,
            tokenizer=tokenizer,
            tokenizer_path=settings.tokenizer_path,
            requires_exact_prompts=settings.exact_prompts == "require",
        )

    def _controller(
        self, limiter: ConcurrencyLimiter, engine: HttpEngine, devices: DeviceWatch
    ) -> ConcurrencyController | None:
        """Returns the controller of ``num_process: auto``; None if the number is fixed."""
        if self._job.settings.num_process != AUTO:
            return None
        return ConcurrencyController(
            limiter,
            self._bounds,
            engine,
            devices=lambda: devices.newest,
            is_paused=lambda: not self._job.may_play.is_set(),
            keep=self._keep_concurrency,
        )

    async def _keep_concurrency(self, state: ConcurrencyState, load: EngineLoad | None) -> None:
        waiting = None if load is None else load.waiting
        keep = partial(store_concurrency, limit=state.limit, reason=state.reason.value, waiting=waiting)
        await self._job.call_store(keep, self._job.buffer.store, self._job.key, os.getpid())

    async def _keep_device_report(self, report: Mapping[str, Any]) -> None:
        await self._job.call_store(lambda: store_report(self._job.buffer.store, self._job.key, os.getpid(), report))

    def _generator_context(self, engine: HttpEngine, tokenizer: Any) -> GeneratorContext:
        return GeneratorContext(
            job_id=self._job.record.job_id,
            engine=engine,
            tokenizer=tokenizer,
            concurrency=self._bounds.max_limit,
            ray_address=self._ray_address,
            options=self._job.settings.options,
            read_instances=self._read_instances,
        )

    def _read_instances(self) -> Iterator[Instance]:
        with self._job.buffer.store.read() as connection:
            yield from planned_instances(connection, self._job.key)

    async def _close_generator(self, generator: Generator) -> None:
        try:
            await asyncio.wait_for(generator.close(), STOP_TIMEOUT_S)
        except Exception:
            # The process exits anyway; the end of the job must not depend on close().
            logger.exception("job %s: closing the generator failed", self._job.record.job_id)


async def _watch(devices: DeviceWatch, controller: ConcurrencyController | None) -> None:
    """Reports devices and adjusts the concurrency limit until cancelled."""
    async with asyncio.TaskGroup() as watches:
        watches.create_task(devices.watch())
        if controller is not None:
            watches.create_task(controller.watch())


def _bounds(settings: JobSettings, group_size: int) -> Bounds:
    """Returns the bounds of the concurrency limit; both are ``num_process`` if it is a number."""
    if settings.num_process != AUTO:
        return Bounds(min_limit=settings.fixed_num_process(), max_limit=settings.fixed_num_process(), step=1)
    max_limit = settings.num_process_max
    min_limit = min(max_limit, settings.num_process_min or group_size)
    return Bounds(min_limit=min_limit, max_limit=max_limit, step=max(group_size, MIN_STEP))
