"""Claims of slots of ``external`` jobs by third-party agents.

A claim is an attempt like those of a runner: its number fences late results. A failed claim has no reward; its slot can
be claimed again until ``max_attempts`` claims of the slot have failed. Claims outlive the process that made them. The
transaction that ends a claim also closes the claim's group if the group is full then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import BusyError, ConflictError, NotFoundError, UnavailableError
from slime_plugins.rollout_buffer.gateway.settings import DEFAULT_IDLE_TIMEOUT_S
from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.state.group_opening import instance_of, is_planned, open_next, open_next_of_instance
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, delivery_rows, group_rows, job_rows
from slime_plugins.rollout_buffer.storage.tables.attempt_rows import OpenSession, SlotUse
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import AttemptState, GroupState, Instance, JobState, Trajectory, WriteStatus

PLAYED_BY_RUNNER = "job {} is played by a runner of its own: start one of task_type external"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotClaim:
    """A slot claimed by an attempt. ``uid`` names its trajectory."""

    job: JobRecord
    group: GroupRecord
    instance: Instance
    slot: int
    attempt: int
    idle_timeout_s: float
    claimed_at: float

    @property
    def uid(self) -> str:
        """The id of the attempt and its trajectory, unique in the store."""
        return self.group.attempt_uid(self.slot, self.attempt)

    @property
    def attempt_key(self) -> dict[str, int]:
        """The key of the claim's attempt in the store."""
        return {"group_key": self.group.key, "slot": self.slot, "attempt": self.attempt}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedClaim:
    """A claim that has ended, with the reward or the error."""

    uid: str
    state: AttemptState
    error_code: str | None = None
    error_message: str | None = None
    reward: float | None = None

    def __str__(self) -> str:
        if self.state is AttemptState.FINISHED:
            return f"is closed, with the reward {self.reward:g}"
        why = self.error_message or "its job is over"
        return f"is over without a reward ({self.error_code or self.state}): {why}"


class SlotClaims:
    """Claims and finishes slots of external jobs. Thread-safe."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def open_sessions(self) -> dict[str, OpenSession]:
        """Returns the sessions that have not ended, of all processes, by id."""
        with self._buffer.store.read_one() as connection:
            return {str(session.uid): session for session in attempt_rows.open_sessions(connection)}

    def count_open(self) -> int:
        with self._buffer.store.read_one() as connection:
            return attempt_rows.count_open_sessions(connection)

    def touch(self, claims: Sequence[SlotClaim]) -> float:
        """Stores that sessions are in use; returns the stored time."""
        now = self._buffer.clock()
        with self._buffer.store.write() as connection:
            attempt_rows.touch(connection, [claim.attempt_key for claim in claims], now)
        return now

    def claim(
        self,
        connection: Connection,
        job_id: str,
        instance_id: str | None = None,
        *,
        idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S,
        max_sessions: int = sys.maxsize,
    ) -> SlotClaim:
        """Claims the next open slot in input order, or the next open slot of an instance.

        In a job without input, the first claim that names an instance creates it, as the first written item does.

        Raises:
            NotFoundError: there is no such job or instance.
            ConflictError: the job is played by a runner of its own, is over, or has no open group any more.
            UnavailableError: the job is paused.
            BusyError: every open slot is taken or given up, as many groups wait for the trainer as the job allows, or
                ``max_sessions`` sessions are open.
        """
        if attempt_rows.count_open_sessions(connection) >= max_sessions:
            raise BusyError(f"{max_sessions} sessions are open, which is the limit: close some")
        job = _job_for_claim(connection, job_id)
        group, slot = _free_slot(connection, job, instance_id)
        now = self._buffer.clock()
        if group.opened_at is None:
            _check_room(connection, job)
            group_rows.update_group(connection, group.key, opened_at=now)
        attempt = attempt_rows.insert_attempt(
            connection, group.key, slot, job.fence, now, idle_timeout_s=idle_timeout_s
        )
        return SlotClaim(
            job=job,
            group=group,
            instance=instance_of(connection, group),
            slot=slot,
            attempt=attempt,
            idle_timeout_s=idle_timeout_s,
            claimed_at=now,
        )

    def finish(self, claim: SlotClaim, trajectory: Trajectory, *, turns: int = 0) -> WriteStatus:
        """Stores a claim's trajectory; returns ``stored``, ``late`` or, if repeated, ``duplicate``.

        ``turns`` is the number of the claim's stored turns, which are deleted.

        Raises:
            StaleAttemptError: the attempt was given up before.
            UnavailableError: another process has added a turn.
        """
        return self._buffer.add_trajectory(
            claim.job.fence, claim.group, claim.slot, claim.attempt, trajectory, turns=turns
        ).status

    def fail(self, connection: Connection, claim: SlotClaim, failure: AttemptFailure) -> None:
        """Ends a claim without a trajectory and without a reward.

        Raises:
            StaleAttemptError: the job was taken over by another process.
        """
        self._buffer.fail_attempt(claim.job.fence, claim.group, claim.slot, claim.attempt, failure, within=connection)

    def find(self, uid: str) -> SlotClaim | EndedClaim | None:
        """Returns an open claim, also of another process; if it has ended, how it ended; None if it never existed."""
        attempt_uid = AttemptUid.parse(uid)
        if attempt_uid is None:
            return None
        with self._buffer.store.read() as connection:
            group = group_rows.find_group(connection, attempt_uid.job_key, attempt_uid.epoch, attempt_uid.position)
            if group is None:
                return None
            attempt = attempt_rows.find_attempt(connection, group.key, attempt_uid.slot, attempt_uid.attempt)
            if attempt is None or attempt.idle_timeout_s is None:
                return None  # an attempt of a runner is no claim
            if attempt.state is not AttemptState.RUNNING:
                return EndedClaim(
                    uid=uid,
                    state=attempt.state,
                    error_code=attempt.error_code,
                    error_message=attempt.error_message,
                    reward=attempt.reward,
                )
            return SlotClaim(
                job=job_rows.get_job(connection, attempt_uid.job_key),
                group=group,
                instance=instance_of(connection, group),
                slot=attempt_uid.slot,
                attempt=attempt_uid.attempt,
                idle_timeout_s=attempt.idle_timeout_s,
                claimed_at=attempt.started_at,
            )

    def why_group_closed(self, claim: SlotClaim) -> str:
        """Returns why the group of a claim was closed; empty if it is open."""
        with self._buffer.store.read() as connection:
            group = group_rows.get_group(connection, claim.group.key)
        if group.state is GroupState.OPEN:
            return ""
        return f"its group is {group.state.value}" + (f" ({group.cause})" if group.cause else "")


def _job_for_claim(connection: Connection, job_id: str) -> JobRecord:
    job = job_rows.find_job(connection, job_id)
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:300]!r}; GET /jobs lists them")
    if job.has_runner:
        raise ConflictError(PLAYED_BY_RUNNER.format(job.job_id))
    if job.state is JobState.PAUSED:
        raise UnavailableError(f"job {job.job_id} is paused: no slot can be claimed until it is resumed")
    if job.state not in job_states.OPEN_STATES:
        raise ConflictError(f"job {job.job_id} is {job.state.value}: it has no open slot", {"state": job.state.value})
    return job


def _check_room(connection: Connection, job: JobRecord) -> None:
    """Refuses a new group beyond ``max_groups_ahead`` or ``max_groups_ready``."""
    limits = job.settings
    ready, leased = delivery_rows.count_ready_and_leased(connection, job.key)
    if limits.max_groups_ready is not None and ready >= limits.max_groups_ready:
        raise BusyError(f"{ready} groups of job {job.job_id} wait for the trainer: try again when it has fetched some")
    if limits.max_groups_ahead is None:
        return
    if ready + leased + group_rows.count_started(connection, job.key) >= limits.max_groups_ahead:
        raise BusyError(
            f"{limits.max_groups_ahead} groups of job {job.job_id} are being worked on or wait for the trainer: try "
            "again when it has fetched some"
        )


def _free_slot(connection: Connection, job: JobRecord, instance_id: str | None) -> tuple[GroupRecord, int]:
    limit = job.settings.max_attempts
    for group in _open_groups(connection, job, instance_id):
        uses = attempt_rows.slot_uses(connection, group.key)
        for slot in range(job.group_size):
            use = uses.get(slot, SlotUse())
            if not use.filled and not use.running and use.failures < limit:
                return group, slot
    suffix = f" of instance {instance_id[:300]!r}" if instance_id is not None else ""
    if _has_open_group(connection, job, instance_id):
        raise BusyError(f"every open slot{suffix} of job {job.job_id} is taken or given up: retry when a session ends")
    raise ConflictError(f"job {job.job_id} has no open group{suffix} any more")


def _open_groups(connection: Connection, job: JobRecord, instance_id: str | None) -> Iterator[GroupRecord]:
    """Yields the open groups of a job, or of one instance; inserts further groups while the caller asks for more."""
    if instance_id is None:
        if not job.has_input:
            raise ConflictError(f"job {job.job_id} has no input: name the instance with instance_id")
        yield from group_rows.open_groups_with_room(connection, job.key, job.group_size)
        while open_next(connection, job.key, 1):
            yield from group_rows.open_groups_with_room(connection, job.key, job.group_size)
        return
    groups = group_rows.groups_of_instance(connection, job.key, instance_id)
    if not groups and job.has_input and not is_planned(connection, job.key, instance_id):
        raise NotFoundError(f"job {job.job_id} has no instance {instance_id[:300]!r}")
    if not groups and not job.has_input:
        group_rows.insert_group_of_new_instance(connection, job.key, instance_id)
        groups = group_rows.groups_of_instance(connection, job.key, instance_id)
    yield from (group for group in groups if group.state is GroupState.OPEN)
    while opened := open_next_of_instance(connection, job.key, instance_id):
        yield opened


def _has_open_group(connection: Connection, job: JobRecord, instance_id: str | None) -> bool:
    if instance_id is None:
        return delivery_rows.has_groups(connection, job.key, GroupState.OPEN)
    groups = group_rows.groups_of_instance(connection, job.key, instance_id)
    return any(group.state is GroupState.OPEN for group in groups)
