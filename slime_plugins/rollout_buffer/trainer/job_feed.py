"""Fetches the ready groups of one job, with retries, and logs the reason of a long wait.

A delivery is leased: it is redelivered unless it is acknowledged in time. Acknowledgements are sent with the next poll,
or by ``flush_acks``. A poll whose reply was lost is repeated with the same ``poll_id`` and gets the same delivery.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import requests

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient, RolloutBufferClient, why_no_answer
from slime_plugins.rollout_buffer.errors import BusyError, DamagedError, NotFoundError, RolloutBufferError
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.trainer.settings import FeedSettings
from slime_plugins.rollout_buffer.wire import RolloutData, StartReply

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_POLL_PAUSE_S = 0.2
MAX_POLL_PAUSE_S = 10.0
MAX_MALFORMED_REPLIES = 5
MAX_OUTAGE_S = 900.0
"""Time during which calls may fail if ``max_failures`` is None."""
LOG_INTERVAL_S = 60.0
MAX_STANDSTILL_S = 3600.0
"""Time after which the wait for a blocked job fails; the wait for a job that a person paused has no limit."""
MIN_POLL_S = 0.5
"""Minimum time between two polls, unless ``wait_s`` is shorter, and pause between two questions of a drain."""
JOB_END_TIMEOUT_S = 10.0
"""Time in which a job whose last group is closed must reach its final state."""
_TOLERATED_CODES = ("paused", "nothing_kept")
"""Codes of explanations that never end the wait: a person paused the job, or all its groups are filtered."""


class InputExhaustedError(RolloutBufferError):
    """All groups of the job were delivered, and the rollout needs more."""

    code = "input_exhausted"


class JobEndedError(RolloutBufferError):
    """The job was cancelled or has failed: it delivers no more groups."""

    code = "job_ended"


class JobStalledError(RolloutBufferError):
    """The buffer reported for ``MAX_STANDSTILL_S`` that the job is blocked.

    Also raised if attempts that a drain gave up still run after this time.
    """

    code = "job_stalled"


class RetriesUsedUpError(RolloutBufferError):
    """Calls to the buffer failed more often than ``max_failures`` allows, or for ``MAX_OUTAGE_S``."""

    code = "retries_used_up"


class FailureTally:
    """Retry policy of one call: counts failures in a row and returns the delay before the next attempt.

    Network errors, server errors (5xx), 429 and malformed replies are retried; other refusals (4xx) and damaged bytes
    are raised at once. ``max_failures`` None limits the time to ``MAX_OUTAGE_S`` instead.
    """

    def __init__(self, what: str, max_failures: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._max_failures = max_failures
        self._clock = clock
        self._began: float | None = None
        self._failures = 0
        self._malformed = 0

    def pause_after(self, error: Exception) -> float:
        """Returns the delay before the next attempt.

        Raises:
            RetriesUsedUpError: the limit is reached.
            Exception: ``error`` itself, if it cannot be retried.
        """
        if not _is_retryable(error):
            raise error
        self._failures += 1
        self._malformed += isinstance(error, ValueError)
        if self._used_up() or self._malformed > MAX_MALFORMED_REPLIES:
            raise RetriesUsedUpError(
                f"{self._what} failed {self._failures} times, the last time with {_described(error)}",
                {"failures": self._failures},
            ) from error
        pause = backoff_s(
            self._failures, first_s=FIRST_POLL_PAUSE_S, longest_s=MAX_POLL_PAUSE_S, jitter=random.random()
        )
        logger.warning("%s failed (%s); retry %d in %.1f s", self._what, _described(error), self._failures, pause)
        return pause

    def _used_up(self) -> bool:
        if self._began is None:
            self._began = self._clock()
        if self._max_failures is None:
            return self._clock() - self._began > MAX_OUTAGE_S
        return self._failures > self._max_failures


def _is_retryable(error: Exception) -> bool:
    if isinstance(error, RolloutBufferError):
        return isinstance(error, BusyError) or (
            error.http_status >= 500 and not isinstance(error, DamagedError | ValueError)
        )
    transient = (aiohttp.ClientError, requests.RequestException, TimeoutError, OSError, ValueError)
    return isinstance(error, transient) and not isinstance(error, aiohttp.InvalidURL | requests.exceptions.InvalidURL)


def _described(error: Exception) -> str:
    """Returns the buffer's message, or a short description of a network error."""
    if isinstance(error, RolloutBufferError):
        return error.message
    if isinstance(error, ValueError) and not isinstance(error, requests.RequestException):
        return str(error)
    return why_no_answer(error)


async def with_retries(what: str, max_failures: int | None, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Calls ``attempt`` until it succeeds, as ``FailureTally`` allows.

    Raises:
        RetriesUsedUpError: the limit is reached.
    """
    tally = FailureTally(what, max_failures)
    while True:
        try:
            return await attempt()
        except Exception as error:  # noqa: BLE001 - pause_after re-raises errors that cannot be retried
            await asyncio.sleep(tally.pause_after(error))


def call_with_retries(what: str, max_failures: int | None, call: Callable[[], Result]) -> Result:
    """As ``with_retries``, for a call that blocks."""
    tally = FailureTally(what, max_failures)
    while True:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - pause_after re-raises errors that cannot be retried
            time.sleep(tally.pause_after(error))


def send_start(settings: FeedSettings, payload: Mapping[str, Any]) -> StartReply:
    """Sends ``start_rollout`` with retries; logs the notes of the reply.

    Raises:
        RequestError: the buffer refuses the payload; the message names the error.
        RetriesUsedUpError: calls to the buffer failed for too long.
    """
    client = RolloutBufferClient(settings.buffer_url, token=settings.token, timeout_s=settings.timeout_s)
    reply = call_with_retries("start_rollout", settings.max_failures, lambda: client.start_rollout(payload))
    for note in reply.notes:
        logger.warning("job %s: %s", reply.job_id, note)
    return reply


class JobFeed:
    """Fetches the groups of one job for one consumer. One call at a time."""

    def __init__(self, client: AsyncRolloutBufferClient, settings: FeedSettings, job_id: str | None = None) -> None:
        self._client = client
        self._settings = settings
        self.job_id = job_id or settings.job_id
        self.weight_version: int | None = None
        """The trainer's newest weight version, sent with every poll."""
        self._to_acknowledge: dict[str, frozenset[int]] = {}
        self.lost: dict[str, frozenset[int]] = {}
        """Deliveries, with their groups, that went to another consumer before they were acknowledged."""
        self._taken: dict[str, frozenset[int]] = {}
        """Deliveries, with their groups, that were taken and are not to be acknowledged yet."""
        self._poll_id = uuid.uuid4().hex
        self.waited_s = 0.0

    async def resume(self) -> None:
        """Resumes a paused job.

        Raises:
            NotFoundError: there is no such job.
            JobEndedError: the job was cancelled or has failed.
        """
        job = await self._job()
        if job.get("state") == "paused":
            await self._with_retries("resume", lambda: self._client.resume(self.job_id))

    async def pause(self) -> None:
        """Pauses a running job: no episode begins until the next ``resume``. Does nothing to a job in another state."""
        job = await self._with_retries("jobs", lambda: self._client.job(self.job_id))
        if job.get("state") == "running":
            await self._with_retries("pause", lambda: self._client.pause(self.job_id))

    async def drain(self, *, stop: bool = False) -> None:
        """Pauses the job and waits until no attempt runs; ``stop`` gives up running attempts, which are repeated later.

        Raises:
            NotFoundError: there is no such job.
            RetriesUsedUpError: as ``with_retries``.
            JobStalledError: attempts that were given up still run after ``MAX_STANDSTILL_S``.
        """
        began = logged_at = time.monotonic()
        while True:
            job = await self._with_retries("drain", lambda: self._client.drain(self.job_id, stop=stop))
            running, now = (job.get("attempts") or {}).get("running"), time.monotonic()
            if not running:
                return
            if now - logged_at > LOG_INTERVAL_S:
                logged_at = now
                logger.info("waited %.0f s for %d running attempts of job %s", now - began, running, self.job_id)
            if stop and now - began > MAX_STANDSTILL_S:
                raise JobStalledError(f"{running} attempts of job {self.job_id} were given up and do not end")
            await asyncio.sleep(MIN_POLL_S)

    async def next_delivery(self, max_groups: int | None = None) -> RolloutData:
        """Waits for ready groups and returns at most ``max_groups``.

        The caller passes the delivery to ``mark_received`` or ``mark_taken``; until then every call returns the same
        delivery.

        Raises:
            InputExhaustedError: all groups were delivered. Received deliveries are acknowledged; deliveries that were
                only taken are still leased.
            JobEndedError: the job was cancelled or has failed.
            JobStalledError: the job was blocked for ``MAX_STANDSTILL_S``.
            RetriesUsedUpError: calls to the buffer failed for too long.
        """
        began = logged_at = time.monotonic()
        exhausted_at: float | None = None
        standstill = _Standstill(self.job_id)
        while True:
            polled_at = time.monotonic()
            data = await self._with_retries("get_rollout_data", lambda: self._poll(max_groups))
            if data.items or data.delivery_id is not None:
                self.waited_s += time.monotonic() - began
                return data
            job = await self._job()
            if not data.exhausted and self._holds_all_remaining(job):
                raise _input_used_up(self.job_id, job)
            if data.exhausted:
                exhausted_at = exhausted_at or polled_at
                if job.get("state") != "running" or time.monotonic() - exhausted_at > JOB_END_TIMEOUT_S:
                    raise _input_used_up(self.job_id, job)
            if time.monotonic() - logged_at > LOG_INTERVAL_S:
                logged_at = time.monotonic()
                why = await self._why_it_waits(job)
                logger.info("waited %.0f s for %s: %s", logged_at - began, self._wanted(max_groups), why["sentence"])
                standstill.note(why, logged_at)
            # A busy server answers a long poll at once: do not poll again without a pause.
            await asyncio.sleep(max(0.0, min(MIN_POLL_S, self._settings.wait_s) - (time.monotonic() - polled_at)))

    def _wanted(self, max_groups: int | None) -> str:
        groups = "groups" if max_groups is None else f"{max_groups} more group{'' if max_groups == 1 else 's'}"
        return f"{groups} of job {self.job_id}"

    async def _why_it_waits(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Returns ``code``, ``severity`` and ``sentence`` of the buffer's first explanation of the job's state."""
        try:
            first = (await self._client.explanation(self.job_id))["explanation"][0]
            sentence = " ".join(part for part in (first["message"], first["advice"]) if part)
            return {"code": first["code"], "severity": first["severity"], "sentence": sentence}
        except Exception as error:  # noqa: BLE001 - the explanation is optional
            logger.debug("the buffer does not explain job %s: %r", self.job_id, error)
            return {"code": "", "severity": "", "sentence": f"it is {job.get('state')}"}

    def mark_received(self, delivery: RolloutData) -> None:
        """Marks a delivery for acknowledgement by the next poll, or by ``flush_acks``."""
        self.mark_taken(delivery)
        if delivery.delivery_id is not None:
            self.acknowledge_later({delivery.delivery_id: delivery.group_numbers})

    def mark_taken(self, delivery: RolloutData) -> None:
        """Makes the next poll fetch other groups; the delivery stays leased until it is acknowledged.

        A group that was delivered again after its lease expired is acknowledged with its newest delivery only.
        """
        self._poll_id = uuid.uuid4().hex
        if delivery.delivery_id is not None:
            remaining = {earlier: groups - delivery.group_numbers for earlier, groups in self._taken.items()}
            self._taken = {earlier: groups for earlier, groups in remaining.items() if groups}
            self._taken[delivery.delivery_id] = delivery.group_numbers

    def acknowledge_later(self, deliveries: Mapping[str, frozenset[int]]) -> None:
        """Marks deliveries, with their groups, for acknowledgement by the next poll, or by ``flush_acks``."""
        self._to_acknowledge.update(deliveries)
        for delivery_id in deliveries:
            self._taken.pop(delivery_id, None)

    def release(self) -> None:
        """Marks all taken deliveries for acknowledgement, so that the job may play further groups ahead."""
        self.acknowledge_later(dict(self._taken))

    @property
    def groups_held(self) -> int:
        """Number of groups that are leased to this trainer and not marked for acknowledgement."""
        return sum(map(len, self._taken.values()))

    async def flush_acks(self) -> None:
        """Sends pending acknowledgements."""
        if self._to_acknowledge:
            pending = list(self._to_acknowledge)
            try:
                self._note_late_acks(await self._with_retries("ack", lambda: self._client.ack(pending)))
            except NotFoundError as error:
                logger.warning("the buffer no longer has the deliveries to acknowledge: %s", error)
            self._to_acknowledge.clear()

    async def _poll(self, max_groups: int | None) -> RolloutData:
        pending = list(self._to_acknowledge)
        data = await self._client.get_rollout_data(
            job_id=self.job_id,
            max_groups=max_groups,
            wait_s=self._settings.wait_s,
            lease_s=self._settings.lease_s,
            ack=pending,
            consumer_id=self._settings.consumer_id,
            poll_id=self._poll_id,
            images="hash",
            weight_version=self.weight_version,
        )
        self._note_late_acks(data.meta_info.get("acknowledged"))
        for delivery_id in pending:
            self._to_acknowledge.pop(delivery_id, None)
        return data

    def _note_late_acks(self, answer: Any) -> None:
        """Records deliveries whose acknowledgement was too late: they were redelivered to another consumer."""
        late = answer.get("expired") if isinstance(answer, Mapping) else None
        for delivery_id in late or ():
            logger.warning(
                "delivery %s of job %s was acknowledged after its lease had expired and its groups had gone to another "
                "consumer, which trains them (rollout_buffer_lease_s is %g s)",
                delivery_id, self.job_id, self._settings.lease_s,
            )  # fmt: skip
            self.lost[delivery_id] = self._to_acknowledge.get(delivery_id, frozenset())

    def _holds_all_remaining(self, job: Mapping[str, Any]) -> bool:
        """Returns True if all remaining groups of the job are leased to this trainer: waiting would never end.

        A job without input has no last group until it ends, because programs may write further groups.
        """
        groups = job.get("groups") or {}
        no_further_group = job.get("has_input", True) and not (groups.get("open") or groups.get("ready"))
        return no_further_group and self.groups_held > 0 and groups.get("leased", 0) <= self.groups_held

    async def _job(self) -> dict[str, Any]:
        job = await self._with_retries("jobs", lambda: self._client.job(self.job_id))
        if job.get("state") in ("cancelled", "failed"):
            reason = job.get("cause") or job.get("message") or "the buffer gave no reason"
            raise JobEndedError(f"job {self.job_id} is {job['state']}: {reason}", {"job_id": self.job_id})
        warn_of_prompts(job)
        return job

    async def _with_retries(self, what: str, attempt: Callable[[], Awaitable[Result]]) -> Result:
        return await with_retries(what, self._settings.max_failures, attempt)


def _input_used_up(job_id: str, job: Mapping[str, Any]) -> InputExhaustedError:
    """Returns the error, with the job's cause or else the numbers of its failed and filtered groups."""
    cause, groups = str(job.get("cause") or ""), job.get("groups") or {}
    undelivered = ", ".join(f"{groups[state]} {state}" for state in ("failed", "filtered") if groups.get(state))
    counts = f" (of its groups {undelivered})" if undelivered and not cause else ""
    return InputExhaustedError(f"the input of job {job_id} is used up{counts}", {"job_id": job_id, "cause": cause})


class _Standstill:
    """Ends the wait for a job with an error once the job has been blocked for ``MAX_STANDSTILL_S``."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._since: float | None = None

    def note(self, why: Mapping[str, str], now: float) -> None:
        """Records the buffer's explanation ``why``, given at ``now`` on the monotonic clock.

        Raises:
            JobStalledError: the job has been blocked for ``MAX_STANDSTILL_S``.
        """
        if why["severity"] != "stopped" or why["code"] in _TOLERATED_CODES:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= MAX_STANDSTILL_S:
            raise JobStalledError(
                f"job {self._job_id} stood still for {(now - self._since) / 60:.0f} min: {why['sentence']}",
                {"job_id": self._job_id, "code": why["code"]},
            )


def warn_of_prompts(job: Mapping[str, Any]) -> None:
    """Logs each finding of the engine's prompt probe once."""
    for finding in job.get("prompt_findings") or ():
        _warn_of_finding(str(job.get("engine_url")), str(finding))


@functools.lru_cache(maxsize=64)
def _warn_of_finding(engine_url: str, finding: str) -> None:
    logger.warning("the engine at %s %s", engine_url, finding)
