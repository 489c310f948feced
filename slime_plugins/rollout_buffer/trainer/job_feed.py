"""The trainer's end of one job: fetches its finished groups, each once, and never waits in silence.

A delivery is leased: it comes back unless it is acknowledged. Acknowledgements ride on the next poll; ``flush_acks``
sends the last ones. A poll whose reply was lost is repeated under the same id and gets the same delivery.
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
from slime_plugins.rollout_buffer.errors import NotFoundError, RolloutBufferError
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.trainer.settings import FeedSettings
from slime_plugins.rollout_buffer.wire import RolloutData

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
MALFORMED_REPLIES_TOLERATED = 5
MAX_OUTAGE_S = 900.0
"""How long a buffer may be out of reach where no number of failures is set."""
SECONDS_BETWEEN_NOTES = 60.0
MAX_STANDSTILL_S = 3600.0
"""How long a job may stand still until somebody does something; one that a person paused, for ever."""
MIN_POLL_S = 0.5
JOB_END_TIMEOUT_S = 10.0
"""How long a job whose last group is closed may take to say how it ended."""


class InputExhaustedError(RolloutBufferError):
    """Every group of the job was handed out, and the rollout needs more."""

    code = "input_exhausted"


class JobEndedError(RolloutBufferError):
    """The job was cancelled or has failed: no group will come any more."""

    code = "job_ended"


class JobStalledError(RolloutBufferError):
    """The buffer is well, and said for an hour that nothing of the job moves unless somebody mends it."""

    code = "job_stalled"


class RetriesUsedUpError(RolloutBufferError):
    """The buffer could not be reached as often as ``max_failures`` allows, or for ``MAX_OUTAGE_S``."""

    code = "retries_used_up"


class FailureTally:
    """Counts the failures of one call in a row and decides how long to wait, or that it is enough.

    What may pass by itself is tried again: the network, a server that restarts, a reply cut short. What the server
    refuses (4xx) is the caller's to mend and is raised at once. ``max_failures`` None bounds the time instead.
    """

    def __init__(self, what: str, max_failures: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._max_failures = max_failures
        self._clock = clock
        self._began: float | None = None
        self._failures = 0
        self._malformed = 0

    def pause_after(self, error: Exception) -> float:
        """Returns the seconds to wait before the next try.

        Raises:
            RetriesUsedUpError: there is no next try.
            Exception: ``error`` itself, when trying again cannot help.
        """
        if not _may_pass(error):
            raise error
        self._failures += 1
        self._malformed += isinstance(error, ValueError)
        if self._used_up() or self._malformed > MALFORMED_REPLIES_TOLERATED:
            raise RetriesUsedUpError(
                f"{self._what} failed {self._failures} times, the last time with {_named(error)}",
                {"failures": self._failures},
            ) from error
        pause = backoff_s(self._failures, first_s=FIRST_PAUSE_S, longest_s=MAX_PAUSE_S, jitter=random.random())
        logger.warning("%s failed (%s); try %d in %.1f s", self._what, _named(error), self._failures + 1, pause)
        return pause

    def _used_up(self) -> bool:
        if self._began is None:
            self._began = self._clock()
        if self._max_failures is None:
            return self._clock() - self._began > MAX_OUTAGE_S
        return self._failures > self._max_failures


def _may_pass(error: Exception) -> bool:
    if isinstance(error, RolloutBufferError):
        return error.http_status >= 500 and not isinstance(error, ValueError)
    passing = (aiohttp.ClientError, requests.RequestException, TimeoutError, OSError, ValueError)
    return isinstance(error, passing) and not isinstance(error, aiohttp.InvalidURL | requests.exceptions.InvalidURL)


def _named(error: Exception) -> str:
    """What the buffer said of itself, or in a few words what the network did."""
    if isinstance(error, RolloutBufferError):
        return error.message
    if isinstance(error, ValueError) and not isinstance(error, requests.RequestException):
        return str(error)
    return why_no_answer(error)


async def with_retries(what: str, max_failures: int | None, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Returns what ``attempt`` returns, through as many failures as are tolerated.

    Raises:
        RetriesUsedUpError: it failed more often than that.
    """
    tally = FailureTally(what, max_failures)
    while True:
        try:
            return await attempt()
        except Exception as error:  # noqa: BLE001 - pause_after raises again what trying again cannot mend
            await asyncio.sleep(tally.pause_after(error))


def send_start(settings: FeedSettings, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Sends ``start_rollout`` until it is answered, and returns ``job_id``, ``state`` and ``message``.

    Raises:
        RequestError: the buffer refuses the payload; its sentence says what to fix.
        RetriesUsedUpError: it could not be reached as often as is tolerated.
    """
    client = RolloutBufferClient(settings.buffer_url, token=settings.token, timeout_s=settings.timeout_s)
    tally = FailureTally("start_rollout", settings.max_failures)
    while True:
        try:
            reply = client.start_rollout(payload)
        except Exception as error:  # noqa: BLE001 - pause_after raises again what trying again cannot mend
            time.sleep(tally.pause_after(error))
        else:
            for note in reply.notes:
                logger.warning("job %s: %s", reply.job_id, note)
            return {"job_id": reply.job_id, "state": reply.state, "message": reply.message}


class JobFeed:
    """Fetches the groups of one job for one consumer. One call at a time."""

    def __init__(
        self,
        client: AsyncRolloutBufferClient,
        settings: FeedSettings,
        job_id: str | None = None,
        *,
        weight_version: int | None = None,
    ) -> None:
        """``weight_version`` is the trainer's newest: the buffer learns it with every poll."""
        self._client = client
        self._settings = settings
        self.job_id = job_id or settings.job_id
        self.weight_version = weight_version
        self._to_acknowledge: dict[str, frozenset[int]] = {}
        self.lost: dict[str, frozenset[int]] = {}
        """Deliveries, with their groups, that went to another consumer before they were acknowledged."""
        self._taken: dict[str, frozenset[int]] = {}
        """Deliveries, with their groups, that were taken and are not to be acknowledged yet."""
        self._poll_id = uuid.uuid4().hex
        self.waited_s = 0.0

    async def resume(self) -> None:
        """Lets a paused job go on.

        Raises:
            NotFoundError: the buffer does not know the job.
            JobEndedError: it was cancelled or has failed.
        """
        job = await self._job()
        if job.get("state") == "paused":
            await self._with_retries("resume", lambda: self._client.resume(self.job_id))

    async def pause(self) -> None:
        """Stops new episodes until the next ``resume``; a job that has ended already stays as it is."""
        job = await self._with_retries("jobs", lambda: self._client.job(self.job_id))
        if job.get("state") == "running":
            await self._with_retries("pause", lambda: self._client.pause(self.job_id))

    async def drain(self, *, stop: bool = False) -> None:
        """Pauses the job and waits until nothing of it runs; ``stop`` gives up what does, to be played again.

        Raises:
            NotFoundError: the buffer does not know the job.
            RetriesUsedUpError: the buffer stayed out of reach.
        """
        while True:
            job = await self._with_retries("drain", lambda: self._client.drain(self.job_id, stop=stop))
            if not (job.get("attempts") or {}).get("running"):
                return
            await asyncio.sleep(MIN_POLL_S)

    async def next_delivery(self, max_groups: int | None = None) -> RolloutData:
        """Waits until groups are ready and returns at most ``max_groups``; call ``received`` when they are safe.

        Raises:
            InputExhaustedError: no group will ever be ready again. What was received is acknowledged by then; what was
                only taken is still leased.
            JobEndedError: the job was cancelled or has failed.
            JobStalledError: for an hour nothing moved, and nothing would without somebody.
            RetriesUsedUpError: the buffer stayed out of reach.
        """
        began = noted = time.monotonic()
        exhausted_at: float | None = None
        standstill = _Standstill(self.job_id)
        while True:
            asked = time.monotonic()
            data = await self._with_retries("get_rollout_data", lambda: self._poll(max_groups))
            if data.items or data.delivery_id is not None:
                self.waited_s += time.monotonic() - began
                return data
            job = await self._job()
            if not data.exhausted and self._holds_the_rest(job):
                raise _input_used_up(self.job_id, job)
            if data.exhausted:
                exhausted_at = exhausted_at or asked
                if job.get("state") != "running" or time.monotonic() - exhausted_at > JOB_END_TIMEOUT_S:
                    raise _input_used_up(self.job_id, job)
            if time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
                noted = time.monotonic()
                why = await self._why_it_waits(job)
                logger.info("waited %.0f s for %s: %s", noted - began, self._wanted(max_groups), why["sentence"])
                standstill.note(why, noted)
            # A busy server answers a long poll at once; asking again at once would only keep it busy.
            await asyncio.sleep(max(0.0, min(MIN_POLL_S, self._settings.wait_s) - (time.monotonic() - asked)))

    def _wanted(self, max_groups: int | None) -> str:
        groups = "groups" if max_groups is None else f"{max_groups} more group{'' if max_groups == 1 else 's'}"
        return f"{groups} of job {self.job_id}"

    async def _why_it_waits(self, job: Mapping[str, Any]) -> dict[str, str]:
        """Returns ``code``, ``severity`` and one ``sentence``: the buffer's first explanation of its job."""
        try:
            first = (await self._client.explanation(self.job_id))["explanation"][0]
            sentence = " ".join(part for part in (first["message"], first["advice"]) if part)
            return {"code": first["code"], "severity": first["severity"], "sentence": sentence}
        except Exception as error:  # noqa: BLE001 - a reason is good to have; without it the wait goes on as well
            logger.debug("the buffer does not explain job %s: %r", self.job_id, error)
            return {"code": "", "severity": "", "sentence": f"it is {job.get('state')}"}

    def received(self, delivery: RolloutData) -> None:
        """Marks a delivery to be acknowledged by the next poll, or by ``flush_acks``."""
        self.taken(delivery)
        if delivery.delivery_id is not None:
            self.acknowledge_later({delivery.delivery_id: delivery.group_numbers})

    def taken(self, delivery: RolloutData) -> None:
        """Makes the next poll ask for other groups; those of this one stay leased until they are acknowledged."""
        self._poll_id = uuid.uuid4().hex
        if delivery.delivery_id is not None:
            self._taken[delivery.delivery_id] = delivery.group_numbers

    def acknowledge_later(self, deliveries: Mapping[str, frozenset[int]]) -> None:
        """Marks deliveries, with their groups, to be acknowledged by the next poll, or by ``flush_acks``."""
        self._to_acknowledge.update(deliveries)
        for delivery_id in deliveries:
            self._taken.pop(delivery_id, None)

    def release(self) -> None:
        """Marks all that was taken to be acknowledged: a job that plays so many groups ahead has room for others."""
        self.acknowledge_later(dict(self._taken))

    @property
    def groups_held(self) -> int:
        """How many groups are leased to this trainer and not to be acknowledged yet."""
        return sum(map(len, self._taken.values()))

    async def flush_acks(self) -> None:
        """Acknowledges what no poll has acknowledged yet."""
        if self._to_acknowledge:
            pending = list(self._to_acknowledge)
            try:
                self._note_acknowledged(await self._with_retries("ack", lambda: self._client.ack(pending)))
            except NotFoundError as error:
                logger.warning("the buffer has purged what it delivered: %s", error)
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
        self._note_acknowledged(data.meta_info.get("acknowledged"))
        for delivery_id in pending:
            self._to_acknowledge.pop(delivery_id, None)
        return data

    def _note_acknowledged(self, answer: Any) -> None:
        """Keeps what came too late: after its lease ran out, it was given to somebody else."""
        late = answer.get("expired") if isinstance(answer, Mapping) else None
        for delivery_id in late or ():
            logger.warning(
                "delivery %s of job %s was acknowledged after its lease had run out and its groups had gone to another "
                "consumer: they are left out here (rollout_buffer_lease_s is %g s)",
                delivery_id, self.job_id, self._settings.lease_s,
            )  # fmt: skip
            self.lost[delivery_id] = self._to_acknowledge.get(delivery_id, frozenset())

    def _holds_the_rest(self, job: Mapping[str, Any]) -> bool:
        """Returns True if all that is left of a job is leased to this trainer, which cannot wait for itself."""
        groups = job.get("groups") or {}
        to_come = groups.get("open", 0) + groups.get("ready", 0)
        return self.groups_held > 0 and not to_come and groups.get("leased", 0) <= self.groups_held

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
    """Says that no group will come, and which groups gave nothing; where all did, the job's cause says it."""
    cause, groups = str(job.get("cause") or ""), job.get("groups") or {}
    without = ", ".join(f"{groups[state]} {state}" for state in ("failed", "filtered") if groups.get(state))
    of_those = f" (of its groups {without})" if without and not cause else ""
    return InputExhaustedError(f"the input of job {job_id} is used up{of_those}", {"job_id": job_id, "cause": cause})


_GOES_ON = ("paused", "nothing_kept")
"""What a person did on purpose, and episodes that end, though none of them is of use: neither ends a training."""


class _Standstill:
    """Ends a wait that only a person could end, after as long as a person may take."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._since: float | None = None

    def note(self, why: Mapping[str, str], now: float) -> None:
        """Takes what the buffer says of its job now.

        Raises:
            JobStalledError: it has said for ``MAX_STANDSTILL_S`` that the job stands still.
        """
        if why["severity"] != "stopped" or why["code"] in _GOES_ON:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= MAX_STANDSTILL_S:
            raise JobStalledError(
                f"job {self._job_id} stood still for {(now - self._since) / 60:.0f} min: {why['sentence']}",
                {"job_id": self._job_id, "code": why["code"]},
            )


def warn_of_prompts(job: Mapping[str, Any]) -> None:
    """Says once in the log what the job's engine was found to do to prompts."""
    for finding in job.get("prompt_findings") or ():
        _warn_of_finding(str(job.get("engine_url")), str(finding))


@functools.lru_cache(maxsize=64)
def _warn_of_finding(engine_url: str, finding: str) -> None:
    logger.warning("the engine at %s %s", engine_url, finding)
