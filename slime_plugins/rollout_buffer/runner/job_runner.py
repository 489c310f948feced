"""A job's event loop: plays the episodes of one job and closes its groups. One process per job.

    open groups, in order → slots → attempt → generator.play → buffer.add_trajectory → buffer.judge_and_close

Thousands of episodes are coroutines of one loop. What the loop knows it can always read again from the store: after a
crash the next runner takes a higher fencing number, gives up the attempts of the last one, and goes on with the slots
that are still open.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import logging
import os
import random
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, TypeVar
from urllib.parse import quote

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.circuit_breaker import CircuitBreaker
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http import HttpEngine
from slime_plugins.rollout_buffer.engine.openai import ENVELOPE_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.report_pacer import ReportPacer
from slime_plugins.rollout_buffer.errors import (
    EngineAwayError,
    EngineError,
    EpisodeError,
    GeneratorError,
    InvalidPayloadError,
    JobPausedError,
    StaleAttemptError,
    StorageFullError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.observability.logs import log_fields
from slime_plugins.rollout_buffer.observability.tracing import Attributes, NoTracer, Tracer, traced_by
from slime_plugins.rollout_buffer.protocol.request_models import AUTO, JobSettings
from slime_plugins.rollout_buffer.redaction import redacted
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.rules.causes import CauseCode, Shortfall
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, Steering
from slime_plugins.rollout_buffer.rules.jobs import FINAL_STATES
from slime_plugins.rollout_buffer.rules.rewards import as_reward
from slime_plugins.rollout_buffer.runner.attempt_limit import STOP_TIMEOUT_S, AttemptLimit, end_task
from slime_plugins.rollout_buffer.runner.device_watch import DeviceWatch
from slime_plugins.rollout_buffer.runner.group_admission import GROUPS_READ_AHEAD, GroupAdmission
from slime_plugins.rollout_buffer.runner.places import Places, PlaceSteering
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.state.runner_reports import store_concurrency, store_report
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Instance,
    JobState,
    Message,
    Outcome,
    SamplingParams,
    Trajectory,
)

WATCH_INTERVAL_S = 0.5
RETRY_BASE_S = 0.5
RETRY_CAP_S = 30.0
STORE_RETRY_S = 2.0
MIN_STEP = 4
"""By how many episodes ``num_process: auto`` grows at least."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class _FencedError(Exception):
    """Another runner has taken over: this one stops at once and writes nothing more."""


class _StoppedError(Exception):
    """The job is drained at once: what an attempt did so far counts for nothing."""


class _Tried(Enum):
    """What an attempt was for its slot."""

    SETTLED = auto()  # it needs no other
    FAILED = auto()
    NOT_COUNTED = auto()  # nobody's engine answered: it is as if the attempt had not been


@dataclass(slots=True)
class _RunningGroup:
    """A group that this runner plays, and how many of its slots are unsettled."""

    record: GroupRecord
    unsettled: int
    given_up: int
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waiting_to_begin: int = 0


@dataclass(slots=True)
class _FailureStreak:
    """Failures with one error code since the last success."""

    code: str = ""
    count: int = 0
    instances: set[str] = field(default_factory=set)

    def add(self, code: str, instance_id: str) -> None:
        if code != self.code:
            self.code, self.count, self.instances = code, 0, set()
        self.count += 1
        self.instances.add(instance_id)

    def end(self) -> None:
        self.code, self.count, self.instances = "", 0, set()

    def reaches(self, limit: int) -> bool:
        """One instance may be broken in itself: only two tell something of the job."""
        return 0 < limit <= self.count and len(self.instances) > 1


class JobRunner:
    """Plays one job to its end. Build it, then ``await run()`` once."""

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
        """``buffer_url`` is where slime's plain generators write; ``ray_address`` the cluster that has the devices.

        ``tracer`` gets a span for each attempt, with its episode's phases in it.
        """
        self._buffer = buffer
        self._job = buffer.job_by_key(job_key)
        self._settings = buffer.job_settings(self._job)
        self._policy = group_policy(self._job, plugin.reward_range)
        self._plugin = plugin
        self._buffer_url = buffer_url
        self._ray_address = ray_address
        self._tracer: Tracer = tracer or NoTracer()
        self._fence = 0
        self._groups: dict[int, _RunningGroup] = {}
        self._groups_closing = 0
        self._playing: set[asyncio.Task[Trajectory]] = set()
        self._bounds = _bounds(self._settings, self._job.group_size)
        self._places = Places(self._bounds.most)
        self._steering: PlaceSteering | None = None
        self._may_play = asyncio.Event()
        self._store_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._engine: HttpEngine | None = None
        self._engine_reports = ReportPacer()
        self._engine_watch: CircuitBreaker | None = None
        self._prompt_findings: tuple[str, ...] | None = None
        self._streak = _FailureStreak()
        self._admission = GroupAdmission(buffer, self._job, self._stored, self._count_played)

    async def run(self) -> None:
        """Plays until every group is closed or the job is over.

        A generator that cannot start fails the job, with the reason in its ``cause``. Cancelling this coroutine gives
        up the running attempts; the slots stay open for the next runner. What is logged meanwhile names the job.
        """
        with log_fields(job=self._job.job_id), traced_by(self._tracer):
            await self._run()

    async def _run(self) -> None:
        plain = self._plugin.create_generator is None
        self._fence = await self._stored(lambda: self._buffer.begin_running(self._job.key, takes_items=plain))
        self._set_pause(self._job.state)
        logger.info("job %s: runner %d begins", self._job.job_id, self._fence)
        try:
            if self._plugin.create_generator is not None:
                await self._run_generator(self._plugin.create_generator)
            elif self._plugin.run_rollout is not None:
                await self._run_plain_generator(self._plugin.run_rollout)
        except* _FencedError:
            logger.warning(
                "job %s: runner %d stops: it was replaced, or the job is over", self._job.job_id, self._fence
            )
        finally:
            self._store_thread.shutdown(wait=True)

    # --- a generator that plays one episode per call -----------------------------------------------------------------

    async def _run_generator(self, create_generator: Callable[[], Generator]) -> None:
        tokenizer_path = self._settings.tokenizer_path if self._is_exact else str(ENVELOPE_TOKENIZER_PATH)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, tokenizer_path) if tokenizer_path else None
            engine = self._engine = self._connect(tokenizer)
            self._engine_watch = CircuitBreaker(engine)
            generator = create_generator()
            devices = DeviceWatch(generator, self._job.job_id, self._keep_device_report)
            watching = asyncio.create_task(self._look_around(engine, devices))
            try:
                await engine.check_records(self._settings.sampling())
                await generator.start(self._generator_context(engine, tokenizer))
            except BaseException:
                watching.cancel()
                await self._close_generator(generator)
                raise
        except Exception as error:
            # Whatever keeps a generator from starting is the job's cause.
            logger.exception("job %s: the generator does not start", self._job.job_id)
            await self._close_engine()
            cause = f"the generator of {self._job.task_type} does not start: {type(error).__name__}: {error}"
            await self._stored(self._buffer.fail_job, self._job.key, cause[:2000])
            return
        try:
            await self._until_over(self._play_all(generator))
            await devices.look()
        finally:
            watching.cancel()
            await self._close_generator(generator)
            await self._close_engine()

    async def _look_around(self, engine: HttpEngine, devices: DeviceWatch) -> None:
        """Reports the devices and, where nobody has set it, moves the number of episodes at once."""
        async with asyncio.TaskGroup() as watches:
            watches.create_task(devices.watch())
            if self._settings.num_process == AUTO:
                self._steering = PlaceSteering(
                    self._places,
                    self._bounds,
                    engine,
                    devices=lambda: devices.newest,
                    is_paused=lambda: not self._may_play.is_set(),
                    keep=self._keep_concurrency,
                )
                watches.create_task(self._steering.watch())

    async def _keep_concurrency(self, steering: Steering, load: EngineLoad | None) -> None:
        await self._stored(
            lambda: store_concurrency(
                self._buffer.store,
                self._job.key,
                os.getpid(),
                limit=steering.limit,
                reason=steering.reason.value,
                waiting=None if load is None else load.waiting,
            )
        )

    async def _keep_device_report(self, farm: Mapping[str, Any]) -> None:
        await self._stored(lambda: store_report(self._buffer.store, self._job.key, os.getpid(), farm))

    @property
    def _is_exact(self) -> bool:
        """True when the engine takes and gives token ids; only then a trajectory keeps its generations."""
        return self._settings.engine_api != "openai"

    def _connect(self, tokenizer: Any) -> HttpEngine:
        url = str(self._job.engine_url)
        if not self._is_exact:
            return make_engine(url, chat_model=str(self._settings.engine_model), tokenizer=tokenizer)
        return make_engine(
            url,
            api=self._settings.engine_api,
            tokenizer=tokenizer,
            tokenizer_path=self._settings.tokenizer_path,
            requires_exact_prompts=self._settings.exact_prompts == "require",
        )

    def _generator_context(self, engine: HttpEngine, tokenizer: Any) -> GeneratorContext:
        return GeneratorContext(
            job_id=self._job.job_id,
            engine=engine,
            tokenizer=tokenizer,
            concurrency=self._bounds.most,
            ray_address=self._ray_address,
            options=self._settings.options,
        )

    async def _close_generator(self, generator: Generator) -> None:
        try:
            await asyncio.wait_for(generator.close(), STOP_TIMEOUT_S)
        except Exception:
            # What it holds ends with this process at the latest; the job's end must not depend on it.
            logger.exception("job %s: the generator does not close", self._job.job_id)

    async def _close_engine(self) -> None:
        if self._engine_watch is not None:
            await self._engine_watch.close()
        if self._engine is not None:
            await self._engine.close()

    async def _until_over(self, work: Awaitable[None]) -> None:
        """Runs the work beside the watcher; the first to end ends the other."""
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _play_all(self, generator: Generator) -> None:
        if self._settings.exact_prompts == "require" and (complaint := await self._complaint_of_prompts()):
            cause = f"exact_prompts is require, and the engine {complaint}"
            await self._stored(self._buffer.fail_job, self._job.key, cause[:2000], CauseCode.ENGINE_REFUSES)
            return
        async with asyncio.TaskGroup() as episodes:
            async for group in self._admission.groups():
                await self._begin_group(group, generator, episodes)
        await self._stored(self._buffer.finish_if_done, self._job.key)

    async def _complaint_of_prompts(self) -> str:
        """Returns why the engine's prompts are not exact, as soon as it answers; empty when they are."""
        assert self._engine is not None
        while True:
            fidelity = await self._engine.probe_prompts()
            if fidelity is not None:
                return fidelity.complaint
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _read_groups(self, after: tuple[int, int]) -> list[GroupRecord]:
        return self._buffer.open_groups(self._job.key, after=after, limit=GROUPS_READ_AHEAD)

    def _count_played(self) -> int:
        return len(self._groups) + self._groups_closing

    async def _begin_group(self, record: GroupRecord, generator: Generator, episodes: asyncio.TaskGroup) -> None:
        progress = await self._stored(self._buffer.slot_progress, record.key)
        instance = await self._stored(self._buffer.instance, record)
        settled = {slot for slot, done in progress.items() if done[0] or done[1] >= self._settings.max_attempts}
        open_slots = [slot for slot in range(self._job.group_size) if slot not in settled]
        given_up = sum(
            1 for filled, failures in progress.values() if not filled and failures >= self._settings.max_attempts
        )
        group = _RunningGroup(record, len(open_slots), given_up, waiting_to_begin=len(open_slots))
        self._groups[record.key] = group
        if not open_slots:
            await self._close_group(group)
            return
        for slot in open_slots:
            # The place is taken here, so that groups begin in order and no more tasks exist than places.
            await self._places.acquire()
            failures = progress.get(slot, (False, 0))[1]
            task = episodes.create_task(self._fill(group, slot, failures, instance, generator))
            group.tasks.add(task)

    async def _fill(
        self, group: _RunningGroup, slot: int, failures: int, instance: Instance, generator: Generator
    ) -> None:
        """Fills one slot: plays attempts until one brings a trajectory back or the slot is given up."""
        group.waiting_to_begin -= 1
        try:
            while failures < self._settings.max_attempts:
                await self._may_play.wait()
                tried = await self._attempt(group, slot, instance, generator)
                if tried is _Tried.SETTLED:
                    break
                failures += tried is _Tried.FAILED
                await asyncio.sleep(_retry_delay(failures) if failures < self._settings.max_attempts else 0)
        except asyncio.CancelledError:
            if group.record.key in self._groups:
                raise
            return  # the group timed out and was closed without this slot
        finally:
            self._places.release()
        group.unsettled -= 1
        group.given_up += failures >= self._settings.max_attempts
        if group.record.key in self._groups and (group.unsettled == 0 or self._is_hopeless(group)):
            await self._close_group(group)
            for other in group.tasks - {asyncio.current_task()}:
                other.cancel()

    def _is_hopeless(self, group: _RunningGroup) -> bool:
        """Whatever its other slots bring, it is too short to be delivered: ``judge_group`` says so before all else."""
        if not self._settings.stop_hopeless_groups or self._settings.evaluation:
            return False
        return not self._policy.is_enough_when_short(self._job.group_size - group.given_up)

    async def _attempt(self, group: _RunningGroup, slot: int, instance: Instance, generator: Generator) -> _Tried:
        """Plays one attempt."""
        record = group.record
        try:
            number = await self._stored(self._buffer.begin_attempt, self._fence, record, slot)
        except JobPausedError:  # the watch looks only now and then
            self._may_play.clear()
            return _Tried.NOT_COUNTED
        if number is None:
            return _Tried.SETTLED
        request = self._episode_request(record, slot, number, instance)
        with _log_fields_of(record, request):
            return await self._play(group, request, generator)

    async def _play(self, group: _RunningGroup, request: EpisodeRequest, generator: Generator) -> _Tried:
        """Plays an attempt that has begun and keeps what came of it."""
        record, slot, number = group.record, request.slot, request.attempt
        began = asyncio.get_running_loop().time()
        try:
            with self._tracer.span("attempt", _attributes(record, request)) as span:
                trajectory = await self._played(generator, request)
                _check(trajectory, request)
                if not self._is_exact:
                    trajectory = replace(trajectory, generations=())
                span.note({"outcome": str(trajectory.outcome), "reward": trajectory.reward})
            await self._stored(self._buffer.add_trajectory, self._fence, record, slot, number, trajectory)
        except _FencedError:
            raise
        except _StoppedError:
            await self._give_up(record, slot, number, "aborted", "stopped", given_up=True)
            return _Tried.NOT_COUNTED
        except EpisodeError as error:
            away = isinstance(error, EngineAwayError)
            if self._engine_watch is not None and isinstance(error, EngineError):
                self._engine_watch.failed(record.instance_id, error)
            await self._give_up(
                record, slot, number, error.code, error.message, given_up=away, transcript=request.transcript
            )
            return _Tried.NOT_COUNTED if away else _Tried.FAILED
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(record, slot, number, "aborted", "stopped", given_up=True))
            raise
        except Exception as error:
            # A generator's defect costs this attempt and is reported, not fatal.
            logger.exception("job %s: episode %s raised", self._job.job_id, request.uid)
            reason = "".join(traceback.format_exception_only(error)).strip()
            await self._give_up(record, slot, number, GeneratorError.code, reason, transcript=request.transcript)
            return _Tried.FAILED
        self._admission.episode_took(request.instance, asyncio.get_running_loop().time() - began)
        if self._steering is not None:
            self._steering.episode_ended()
        self._streak.end()
        if self._engine_watch is not None:
            self._engine_watch.succeeded()
        return _Tried.SETTLED

    async def _played(self, generator: Generator, request: EpisodeRequest) -> Trajectory:
        """Plays in a task of its own, which can be ended without ending the slot's.

        Raises:
            AttemptTimeoutError: it took too long.
            _StoppedError: the job is drained at once.
        """
        limit = AttemptLimit(self._settings.attempt_timeout_seconds, self._tracer)
        playing = limit.begin(generator.play(request))
        self._playing.add(playing)
        try:
            await limit.wait(playing)
        finally:
            self._playing.discard(playing)
            if not playing.cancelling() and not playing.done():  # the slot's own task was cancelled
                await end_task(playing)
        if playing.cancelled():
            raise _StoppedError
        return playing.result()

    def _episode_request(self, record: GroupRecord, slot: int, attempt: int, instance: Instance) -> EpisodeRequest:
        return EpisodeRequest(
            uid=record.attempt_uid(slot, attempt),
            job_id=self._job.job_id,
            instance=instance,
            epoch=record.epoch,
            slot=slot,
            attempt=attempt,
            sampling_params=self._sampling_params(record, slot),
            options=self._settings.options,
            evaluation=self._settings.evaluation,
        )

    def _sampling_params(self, record: GroupRecord, slot: int) -> SamplingParams:
        """How a slot samples; with a seed its own, the same whenever and however often the slot is tried."""
        params, seed = self._settings.sampling(), self._settings.sampling_seed
        if seed is None:
            return params
        named = f"{seed}/{record.epoch}/{record.instance_id}/{slot}"
        own = int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big") >> 1  # 31 bits: fits every engine
        return replace(params, extra={**params.extra, "sampling_seed": own})

    async def _give_up(
        self,
        record: GroupRecord,
        slot: int,
        attempt: int,
        code: str,
        message: str,
        *,
        given_up: bool = False,
        transcript: Sequence[Message] = (),
    ) -> None:
        if not given_up:
            logger.warning("job %s: slot %d of %s, attempt %d: %s: %s",
                           self._job.job_id, slot, record.instance_id, attempt, code, message)  # fmt: skip
        await self._stored(
            lambda: self._buffer.fail_attempt(
                self._fence,
                record,
                slot,
                attempt,
                code=code,
                message=message,
                given_up=given_up,
                transcript=transcript,
            )
        )
        if not given_up:
            await self._stop_when_all_fail(code, record.instance_id)

    async def _measures_something(self) -> bool:
        """An evaluation that has results goes on: it reports which tasks could not be played, often the last ones."""
        if not self._settings.evaluation:
            return False
        return await self._stored(self._buffer.count_trajectories, self._job.key) > 0

    async def _stop_when_all_fail(self, code: str, instance_id: str) -> None:
        """Ends the job, instead of burning its whole input, when attempts only ever fail in one way."""
        self._streak.add(code, instance_id)
        limit = self._settings.stop_after_failures
        if code == EngineError.code and self._engine_watch is not None and not self._engine_watch.answers_others:
            return  # the watch asks the engine itself: a job whose engine is at fault is paused
        if self._streak.reaches(limit) and not await self._measures_something():
            logger.error("job %s: %d attempts in a row failed with %s: it stops", self._job.job_id, limit, code)
            await self._stored(self._buffer.stop_failing_job, self._job.key, limit)
            raise _FencedError

    async def _close_group(self, group: _RunningGroup, shortfall: Shortfall = Shortfall.SLOTS_FAILED) -> None:
        del self._groups[group.record.key]
        self._groups_closing += 1
        try:
            with log_fields(group=group.record.key, instance=group.record.instance_id):
                await self._stored(self._judge_and_close, group.record, shortfall)
        finally:
            self._groups_closing -= 1

    def _judge_and_close(self, record: GroupRecord, shortfall: Shortfall) -> None:
        verdict = self._buffer.judge_and_close(
            record, self._policy, self._plugin.functions, shortfall=shortfall, fence=self._fence
        )
        if verdict is not None:
            of = f"group {record.instance_id} of epoch {record.epoch}"
            logger.info("job %s: %s is %s %s", self._job.job_id, of, verdict.state.value, verdict.cause.message)

    # --- slime's plain form ------------------------------------------------------------------------------------------

    async def _run_plain_generator(self, run_rollout: Callable[[dict[str, Any]], Any]) -> None:
        """Runs ``run_rollout(data)`` in a thread and closes groups as its items come in over HTTP."""
        data = {
            **self._settings.model_dump(mode="json"),
            "num_process": self._settings.places(),
            "sampling_params": self._settings.plain_sampling_params(),
            "job_id": self._job.job_id,
            "remote_buffer_url": f"{self._buffer_url}/jobs/{quote(self._job.job_id, safe='')}",
            "remote_engine_url": self._job.engine_url,
            "skip_instance_ids": await self._stored(self._buffer.skipped_instance_ids, self._job.key),
        }
        failure = ""
        try:
            await self._until_over(self._beside_closing(_in_daemon_thread(run_rollout, data)))
        except Exception as error:
            # The plugin's own code: its exception is the job's cause.
            logger.exception("job %s: run_rollout raised", self._job.job_id)
            failure = f"run_rollout raised {type(error).__name__}: {error}"
        if failure:
            await self._stored(self._buffer.fail_job, self._job.key, failure[:2000])
            return
        await self._stored(self._close_what_is_left)
        await self._stored(self._buffer.finish_if_done, self._job.key)

    async def _beside_closing(self, running: asyncio.Future[None]) -> None:
        while not running.done():
            await asyncio.wait({running}, timeout=WATCH_INTERVAL_S)
            await self._stored(self._close_groups)
        running.result()

    def _close_groups(self) -> None:
        for record, count in self._buffer.begun_open_groups(self._job.key):
            if count >= self._job.group_size:
                self._judge_and_close(record, Shortfall.NOT_WRITTEN)
        for record in self._buffer.timed_out_groups(self._job):
            self._judge_and_close(record, Shortfall.TIMED_OUT)

    def _close_what_is_left(self) -> None:
        """The generator is through: what it has not filled by now it never will."""
        after = (-1, -1)
        while found := self._read_groups(after):
            for record in found:
                after = (record.epoch, record.position)
                self._judge_and_close(record, Shortfall.NOT_WRITTEN)

    # --- the watcher -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follows what others do to the job. Returns when it is over."""
        while True:
            job = await self._stored(self._buffer.job_by_key, self._job.key)
            if job.fence != self._fence:
                raise _FencedError
            if job.state in FINAL_STATES:
                return
            if self._engine is not None and job.engine_url and job.engine_url != self._job.engine_url:
                logger.info("job %s: the engine is now at %s", job.job_id, redacted(job.engine_url))
                self._engine.set_base_url(job.engine_url)
            self._job = job
            await self._follow_engine()
            self._set_pause(self._job.state)
            if self._job.state is JobState.PAUSED and self._job.cause_code is CauseCode.STOPPED:
                for playing in self._playing:
                    playing.cancel()
            await self._close_timed_out_groups()
            await self._report_engine()
            await self._keep_prompt_findings()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _follow_engine(self) -> None:
        """Pauses the job when its engine answers nobody, and lets it go on when it does again."""
        job, watch = self._job, self._engine_watch
        if watch is None:
            return
        if job.state is JobState.RUNNING and (trouble := watch.trouble()):
            logger.warning("job %s is paused: the engine %s", job.job_id, trouble)
            await self._stored(self._buffer.pause_for_engine, self._fence, job.key, trouble)
        elif job.state is not JobState.PAUSED or job.cause_code is not CauseCode.ENGINE_AWAY:
            return
        elif watch.has_recovered():
            logger.info("job %s goes on: the engine answers again", job.job_id)
            await self._stored(self._buffer.resume_for_engine, self._fence, job.key)
        elif verdict := watch.verdict():
            logger.error("job %s fails: the engine %s", job.job_id, verdict)
            await self._stored(self._buffer.fail_job, job.key, f"the engine {verdict}", CauseCode.ENGINE_REFUSES)
        else:
            return
        self._job = await self._stored(self._buffer.job_by_key, job.key)

    async def _report_engine(self) -> None:
        """Keeps why the engine gives no tokens, for as long as it does not; nothing is written while it is well."""
        if self._engine is not None and self._engine_reports.is_due(report := self._engine.report()):
            await self._stored(self._buffer.report_engine, self._job.key, os.getpid(), report)

    async def _keep_prompt_findings(self) -> None:
        """Keeps what each new engine was found to do to prompts."""
        fidelity = None if self._engine is None else self._engine.fidelity
        if fidelity is not None and fidelity.findings != self._prompt_findings:
            self._prompt_findings = fidelity.findings
            await self._stored(self._buffer.keep_prompt_findings, self._job.key, os.getpid(), fidelity.findings)

    def _set_pause(self, state: JobState) -> None:
        if state is JobState.PAUSED:
            self._may_play.clear()
        else:
            self._may_play.set()

    async def _close_timed_out_groups(self) -> None:
        """Where a limit was set for groups, gives up what runs of one that waits too long for its last members."""
        if self._job.group_timeout_s is None or not self._groups:
            return
        for record in await self._stored(self._buffer.timed_out_groups, self._job):
            group = self._groups.get(record.key)
            if group is not None and not group.waiting_to_begin:
                await self._close_group(group, Shortfall.TIMED_OUT)
                for task in group.tasks:
                    task.cancel()

    async def _stored(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls the store off the event loop, one call at a time; waits for as long as the disk is full or busy."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        while True:
            try:
                return await loop.run_in_executor(self._store_thread, lambda: context.run(function, *arguments))
            except StaleAttemptError as error:
                raise _FencedError(error.message) from error
            except (StorageFullError, UnavailableError) as error:
                logger.error("job %s: %s; trying again", self._job.job_id, error.message)
                await asyncio.sleep(STORE_RETRY_S)


def _bounds(settings: JobSettings, group_size: int) -> Bounds:
    """What the number of episodes at once stays within; a number that was set is both bounds."""
    if settings.num_process != AUTO:
        return Bounds(least=settings.places(), most=settings.places(), step=1)
    most = settings.num_process_max
    least = min(most, settings.num_process_min or group_size)
    return Bounds(least=least, most=most, step=max(group_size, MIN_STEP))


def _in_daemon_thread(function: Callable[[dict[str, Any]], Any], data: dict[str, Any]) -> asyncio.Future[None]:
    """Runs a function that cannot be interrupted; a daemon thread does not keep a cancelled job's process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(None)

    def work() -> None:
        error: BaseException | None = None
        try:
            function(data)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - the plugin's own code: handed to whoever waits
            error = raised if isinstance(raised, Exception) else GeneratorError(f"run_rollout exited: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job was cancelled in the meantime
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name="run_rollout", daemon=True).start()
    return future


def _log_fields_of(record: GroupRecord, request: EpisodeRequest) -> contextlib.AbstractContextManager[None]:
    """Everything that is logged inside is said of this attempt."""
    return log_fields(
        group=record.key, instance=record.instance_id, uid=request.uid, slot=request.slot, attempt=request.attempt
    )


def _attributes(record: GroupRecord, request: EpisodeRequest) -> Attributes:
    """What the span of an attempt says; ``task`` is the instance's ``task_name``, its id where it has none."""
    return {
        "job": request.job_id,
        "group": record.key,
        "uid": request.uid,
        "attempt": request.attempt,
        "task": request.instance.task,
    }


def _check(trajectory: Trajectory, request: EpisodeRequest) -> None:
    if trajectory.outcome is Outcome.ABORTED:
        raise EpisodeError("the episode was given up from outside: what it earned is unknown, not 0")
    for name, value in (("reward", trajectory.reward), ("raw_reward", trajectory.raw_reward)):
        try:
            value is None or as_reward(value)
        except ValueError as error:
            raise GeneratorError(f"play() returned the {name} {value!r:.100}: it {error}") from error
    try:
        wire.check_messages(trajectory.messages)
    except InvalidPayloadError as error:
        raise GeneratorError(f"play() returned messages that train nothing: {error.message}") from error
    turn_level = {"turn_rewards": trajectory.turn_rewards, "token_rewards": trajectory.token_rewards}
    try:
        wire.checked_turn_rewards(turn_level, trajectory.messages, trajectory.generations)
    except InvalidPayloadError as error:
        raise GeneratorError(f"play() returned rewards that do not fit its turns: {error.message}") from error
    if trajectory.uid != request.uid or trajectory.instance_id != request.instance.instance_id:
        raise GeneratorError(
            f"play() returned a trajectory under {trajectory.uid}/{trajectory.instance_id}, "
            f"asked for {request.uid}/{request.instance.instance_id}"
        )


def _retry_delay(failures: int) -> float:
    """Returns seconds to wait after that many failures: doubling, capped, with jitter so that slots do not march."""
    return backoff_s(failures, first_s=RETRY_BASE_S, longest_s=RETRY_CAP_S, jitter=random.random())
