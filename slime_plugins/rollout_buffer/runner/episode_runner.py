"""Plays the episodes of a job: open groups, in order → slots → attempts → trajectories → closed groups.

Thousands of episodes are coroutines of one event loop. All its state can be rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import random
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from slime_plugins.rollout_buffer.errors import (
    EngineAwayError,
    EngineError,
    EpisodeError,
    GeneratorError,
    JobPausedError,
)
from slime_plugins.rollout_buffer.generator.base_generator import Generator
from slime_plugins.rollout_buffer.generator.result_check import checked_trajectory
from slime_plugins.rollout_buffer.observability.logs import log_fields
from slime_plugins.rollout_buffer.observability.tracebacks import own_traceback, with_place
from slime_plugins.rollout_buffer.observability.tracing import Attributes, Tracer
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.rules.causes import CauseCode, Shortfall
from slime_plugins.rollout_buffer.runner.attempt_timeout import AttemptTimeout, end_task
from slime_plugins.rollout_buffer.runner.concurrency import ConcurrencyController, ConcurrencyLimiter
from slime_plugins.rollout_buffer.runner.engine_watch import EngineWatch
from slime_plugins.rollout_buffer.runner.group_admission import GroupAdmission
from slime_plugins.rollout_buffer.runner.played_job import FencedError, PlayedJob
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, JobState, SamplingParams, Trajectory

RETRY_BASE_S = 0.5
RETRY_CAP_S = 30.0

logger = logging.getLogger(__name__)

_STOPPED = AttemptFailure(code="aborted", message="stopped", given_up=True)


class _StoppedError(Exception):
    """The job is drained with ``stop``: the attempt is discarded."""


class _AttemptResult(Enum):
    """What an attempt means for its slot."""

    DONE = auto()  # the slot needs no further attempt
    FAILED = auto()
    NOT_COUNTED = auto()  # the job was paused or drained, or the engine was unreachable: the attempt does not count


@dataclass(slots=True)
class _RunningGroup:
    """A group that this runner plays, with the number of its unfinished slots."""

    record: GroupRecord
    unfinished_slots: int
    given_up_slots: int
    """Slots that used up their attempts."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    waiting_slots: int = 0
    """Slots that wait for the concurrency limit."""


@dataclass(slots=True)
class _FailureStreak:
    """Consecutive failures with one error code."""

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
        """Returns True after ``limit`` failures of at least two instances: one instance may be broken in itself.
        If ``limit`` is 0, never."""
        return 0 < limit <= self.count and len(self.instances) > 1


class EpisodeRunner:
    """Plays the episodes of one job with a generator that has started."""

    def __init__(
        self,
        job: PlayedJob,
        generator: Generator,
        engine: EngineWatch,
        limiter: ConcurrencyLimiter,
        controller: ConcurrencyController | None,
        tracer: Tracer,
    ) -> None:
        """``controller`` changes the concurrency limit (None: it is fixed); ``tracer`` gets a span for each attempt."""
        self._job = job
        self._generator = generator
        self._engine = engine
        self._limiter = limiter
        self._controller = controller
        self._tracer = tracer
        self._groups: dict[int, _RunningGroup] = {}
        self._groups_closing = 0
        self._playing: set[AttemptTimeout] = set()
        self._streak = _FailureStreak()
        self._admission = GroupAdmission(job.buffer, job.record, job.call_store, self._count_played)

    async def run(self) -> None:
        """Plays until every group is closed or the job is over."""
        await self._job.until_over(self._play_all(), self._on_refresh)

    async def _play_all(self) -> None:
        job = self._job
        if job.settings.exact_prompts == "require" and (complaint := await self._engine.complaint_of_prompts()):
            await job.fail(f"exact_prompts is require, and the engine {complaint}", CauseCode.ENGINE_REFUSES)
            return
        async with asyncio.TaskGroup() as episodes:
            async for group in self._admission.groups():
                await self._begin_group(group, episodes)
        await job.call_store(job.buffer.finish_if_done, job.key)

    async def _on_refresh(self) -> None:
        await self._engine.on_refresh()
        record = self._job.record
        if record.state is JobState.PAUSED and record.cause_code is CauseCode.STOPPED:
            for attempt in self._playing:
                attempt.stop()
        await self._close_timed_out_groups()

    def _count_played(self) -> int:
        return len(self._groups) + self._groups_closing

    async def _begin_group(self, record: GroupRecord, episodes: asyncio.TaskGroup) -> None:
        progress = await self._job.call_store(self._job.buffer.slot_progress, record.key)
        instance = await self._job.call_store(self._job.buffer.instance, record)
        filled = {slot for slot, (is_filled, _) in progress.items() if is_filled}
        used_up = {slot for slot, (_, failures) in progress.items() if failures >= self._job.settings.max_attempts}
        open_slots = [slot for slot in range(self._job.record.group_size) if slot not in filled | used_up]
        group = _RunningGroup(record, len(open_slots), len(used_up - filled), waiting_slots=len(open_slots))
        self._groups[record.key] = group
        if not open_slots:
            await self._close_group(group)
            return
        for slot in open_slots:
            # Acquired here, so that groups begin in order and there are no more tasks than the limit.
            await self._limiter.acquire()
            failures = progress.get(slot, (False, 0))[1]
            task = episodes.create_task(self._fill(group, slot, failures, instance))
            task.add_done_callback(lambda _: self._limiter.release())  # also for a task cancelled before it began
            group.tasks.add(task)

    async def _fill(self, group: _RunningGroup, slot: int, failures: int, instance: Instance) -> None:
        """Plays attempts at one slot until one returns a trajectory or the slot is given up."""
        group.waiting_slots -= 1
        try:
            while failures < self._job.settings.max_attempts:
                await self._job.may_play.wait()
                result = await self._attempt(group, slot, instance)
                if result is _AttemptResult.DONE:
                    break
                failures += result is _AttemptResult.FAILED
                await asyncio.sleep(_retry_delay(failures) if failures < self._job.settings.max_attempts else 0)
        except asyncio.CancelledError:
            if group.record.key in self._groups:
                raise
            return  # the group was closed without this slot: it timed out or was hopeless
        group.unfinished_slots -= 1
        group.given_up_slots += failures >= self._job.settings.max_attempts
        if group.record.key in self._groups and (group.unfinished_slots == 0 or self._is_hopeless(group)):
            await self._close_group(group)
            for other in group.tasks - {asyncio.current_task()}:
                other.cancel()

    def _is_hopeless(self, group: _RunningGroup) -> bool:
        """Returns True if the job stops hopeless groups, and no result of the other slots can make this one
        deliverable (see ``judge_group``)."""
        if not self._job.settings.stop_hopeless_groups or self._job.settings.evaluation:
            return False
        return not self._job.policy.accepts_short(self._job.record.group_size - group.given_up_slots)

    async def _attempt(self, group: _RunningGroup, slot: int, instance: Instance) -> _AttemptResult:
        record = group.record
        try:
            number = await self._job.call_store(self._job.buffer.begin_attempt, self._job.fence, record, slot)
        except JobPausedError:  # paused since the last refresh of the job
            self._job.may_play.clear()
            return _AttemptResult.NOT_COUNTED
        if number is None:
            return _AttemptResult.DONE
        request = self._episode_request(record, slot, number, instance)
        with _log_fields_of(record, request):
            return await self._play(group, request)

    async def _play(self, group: _RunningGroup, request: EpisodeRequest) -> _AttemptResult:
        """Plays an attempt that has begun and stores its result."""
        job, record, slot, number = self._job, group.record, request.slot, request.attempt
        began = asyncio.get_running_loop().time()
        try:
            with self._tracer.span("attempt", _attributes(record, request)) as span:
                trajectory = checked_trajectory(await self._played(request), request)
                if not job.is_exact:
                    trajectory = replace(trajectory, generations=())
                span.note({"outcome": str(trajectory.outcome), "reward": trajectory.reward})
            await job.call_store(job.buffer.add_trajectory, job.fence, record, slot, number, trajectory)
        except FencedError:
            raise
        except _StoppedError:
            await self._store_failure(record, slot, number, _STOPPED)
            return _AttemptResult.NOT_COUNTED
        except EpisodeError as error:
            away = isinstance(error, EngineAwayError)
            if isinstance(error, EngineError):
                self._engine.breaker.failed(record.instance_id, error)
            failure = AttemptFailure(
                code=error.code, message=error.message, given_up=away, transcript=request.transcript
            )
            await self._store_failure(record, slot, number, failure)
            return _AttemptResult.NOT_COUNTED if away else _AttemptResult.FAILED
        except asyncio.CancelledError:
            await asyncio.shield(self._store_failure(record, slot, number, _STOPPED))
            raise
        except Exception as error:
            # An error of the generator fails this attempt only.
            logger.exception("job %s: episode %s raised", job.record.job_id, request.uid)
            reason, own = with_place(error, job.generator_file), own_traceback(error)
            failure = AttemptFailure(
                code=GeneratorError.code, message=reason, transcript=request.transcript, traceback=own
            )
            await self._store_failure(record, slot, number, failure)
            return _AttemptResult.FAILED
        self._admission.episode_took(request.instance, asyncio.get_running_loop().time() - began)
        if self._controller is not None:
            self._controller.episode_ended()
        self._streak.end()
        self._engine.breaker.succeeded()
        return _AttemptResult.DONE

    async def _played(self, request: EpisodeRequest) -> Trajectory:
        """Plays the episode in a task of its own, so that it can be cancelled without cancelling the slot.

        Raises:
            AttemptTimeoutError: the attempt took too long.
            GeneratorError: ``play()`` exited, or awaited a task that it had cancelled itself.
            _StoppedError: the job is drained with ``stop``.
        """
        limit = AttemptTimeout(self._job.settings.attempt_timeout_seconds, self._tracer)
        playing = limit.begin(_without_exit(self._generator, request))
        self._playing.add(limit)
        try:
            await limit.wait(playing)
        finally:
            self._playing.discard(limit)
            if not playing.cancelling() and not playing.done():  # the slot's own task was cancelled
                await end_task(playing)
        if playing.cancelled() or not playing.done():
            raise _StoppedError if playing.cancelling() else GeneratorError("play() raised CancelledError by itself")
        return playing.result()

    def _episode_request(self, record: GroupRecord, slot: int, attempt: int, instance: Instance) -> EpisodeRequest:
        return EpisodeRequest(
            uid=record.attempt_uid(slot, attempt),
            job_id=self._job.record.job_id,
            instance=copy.deepcopy(instance),  # so that the group's other slots do not see what play() changes in it
            epoch=record.epoch,
            slot=slot,
            attempt=attempt,
            sampling_params=self._sampling_params(record, slot),
            options=self._job.settings.options,
            evaluation=self._job.settings.evaluation,
        )

    def _sampling_params(self, record: GroupRecord, slot: int) -> SamplingParams:
        """Returns the sampling parameters of a slot; a job's seed gives each slot a seed of its own, which all attempts
        at the slot share."""
        params, seed = self._job.settings.sampling(), self._job.settings.sampling_seed
        if seed is None:
            return params
        text = f"{seed}/{record.epoch}/{record.instance_id}/{slot}"
        slot_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1  # 31 bits fit any engine
        return replace(params, extra={**params.extra, "sampling_seed": slot_seed})

    async def _store_failure(self, record: GroupRecord, slot: int, attempt: int, failure: AttemptFailure) -> None:
        if not failure.given_up:
            details = (self._job.record.job_id, slot, record.instance_id, attempt, failure.code, failure.message)
            logger.warning("job %s: slot %d of %s, attempt %d: %s: %s", *details)
        await self._job.call_store(self._job.buffer.fail_attempt, self._job.fence, record, slot, attempt, failure)
        if not failure.given_up:
            await self._stop_when_all_fail(failure.code, record.instance_id)

    async def _has_evaluation_results(self) -> bool:
        """Returns True for an evaluation that has results. Such a job is not failed: it reports the tasks that could
        not be played."""
        job = self._job
        return job.settings.evaluation and await job.call_store(job.buffer.count_trajectories, job.key) > 0

    async def _stop_when_all_fail(self, code: str, instance_id: str) -> None:
        """Fails a job whose attempts fail in a row with one error code, instead of consuming the whole input."""
        self._streak.add(code, instance_id)
        limit = self._job.settings.stop_after_failures
        if code == EngineError.code and not self._engine.breaker.answers_others:
            return  # engine_watch pauses a job whose engine is at fault
        if self._streak.reaches(limit) and not await self._has_evaluation_results():
            logger.error(
                "job %s: %d attempts in a row failed with %s: the job fails", self._job.record.job_id, limit, code
            )
            await self._job.call_store(self._job.buffer.stop_failing_job, self._job.fence, self._job.key, limit)
            raise FencedError

    async def _close_group(self, group: _RunningGroup, shortfall: Shortfall = Shortfall.SLOTS_FAILED) -> None:
        del self._groups[group.record.key]
        self._groups_closing += 1
        try:
            with log_fields(group=group.record.key, instance=group.record.instance_id):
                await self._job.call_store(self._job.judge_and_close, group.record, shortfall)
        finally:
            self._groups_closing -= 1

    async def _close_timed_out_groups(self) -> None:
        """Cancels the running attempts of groups that reached ``group_timeout_seconds``, and closes these groups."""
        if self._job.record.group_timeout_s is None or not self._groups:
            return
        for record in await self._job.call_store(self._job.buffer.timed_out_groups, self._job.record):
            group = self._groups.get(record.key)
            if group is not None and not group.waiting_slots:
                await self._close_group(group, Shortfall.TIMED_OUT)
                for task in group.tasks:
                    task.cancel()


async def _without_exit(generator: Generator, request: EpisodeRequest) -> Trajectory:
    """Plays the episode. An exit, as of a program that a model wrote, becomes an error: it would end the runner."""
    try:
        return await generator.play(request)
    except (SystemExit, KeyboardInterrupt) as error:
        raise GeneratorError(f"play() ended by {error!r}") from error


def _log_fields_of(record: GroupRecord, request: EpisodeRequest) -> contextlib.AbstractContextManager[None]:
    """Adds group and attempt to each log line of the block."""
    return log_fields(
        group=record.key, instance=record.instance_id, uid=request.uid, slot=request.slot, attempt=request.attempt
    )


def _attributes(record: GroupRecord, request: EpisodeRequest) -> Attributes:
    """Returns the attributes of an attempt's span; ``task`` is the instance's ``task_name``, or else its id."""
    return {
        "job": request.job_id,
        "group": record.key,
        "uid": request.uid,
        "attempt": request.attempt,
        "task": request.instance.task,
    }


def _retry_delay(failures: int) -> float:
    """Returns the seconds to wait after so many failures: exponential, capped, with jitter."""
    return backoff_s(failures, first_s=RETRY_BASE_S, longest_s=RETRY_CAP_S, jitter=random.random())
