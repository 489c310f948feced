"""State changes of jobs, groups, attempts and deliveries, which decide what the trainer gets.

Each method that changes state does so in one transaction, unless its docstring names several. Sessions of the gateway,
reports of runners, reward versions and the recovery at start are no methods of ``Buffer``: their modules open their own
transactions.

    start_job            starts a job, or attaches to one
    begin_attempt        begins a runner's attempt to fill a slot; its number fences late results
    add_trajectory       stores a runner's result, idempotent by uid and fenced
    write_items          stores items that were written over HTTP
    judge_and_close      judges a group and closes it, once
    take / acknowledge   leases groups to a poll; delivers them when the lease is acknowledged
    expire_leases        makes unacknowledged groups ready again

Servers, runners and the supervisor each have their own ``Buffer`` on the same store.
"""

from __future__ import annotations

# slime's users start the buffer with ``python buffer.py``, which runs ``rollout-buffer serve``. Neither the script's
# folder nor the working directory may be on the path of its processes: ``types.py`` here would hide Python's module.
if __name__ == "__main__":
    import os
    import sys

    folder = os.path.dirname(os.path.abspath(__file__))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    other_entries = [entry for entry in entries if entry and os.path.abspath(entry) != folder]
    path = os.pathsep.join([os.path.dirname(os.path.dirname(folder)), *other_entries])
    os.environ.update(PYTHONPATH=path, PYTHONSAFEPATH="1")
    os.execv(sys.executable, [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", *sys.argv[1:]])

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.errors import StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.rules.causes import (
    CANCELLED,
    DAMAGED,
    IDLE,
    NO_CAUSE,
    STOPPED,
    Cause,
    CauseCode,
    Shortfall,
    engine_away,
)
from slime_plugins.rollout_buffer.rules.groups import GroupFunctions, GroupPolicy, Verdict
from slime_plugins.rollout_buffer.rules.heartbeats import ENGINE, GATEWAY, PROMPTS
from slime_plugins.rollout_buffer.state import (
    attempts,
    deliveries,
    delivery_leases,
    delivery_meta,
    group_opening,
    job_lookup,
    job_start,
    staleness,
)
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.delivery_reader import DeliveredMembers, only_played
from slime_plugins.rollout_buffer.state.group_closing import close_full_groups, judge_and_close, judge_and_close_outside
from slime_plugins.rollout_buffer.state.item_writes import ItemWriter, Refusal, Write, Written, groups_of_known_instance
from slime_plugins.rollout_buffer.state.job_start import StartAction, StartedJob
from slime_plugins.rollout_buffer.state.job_transitions import cancel_job, end_job, set_state
from slime_plugins.rollout_buffer.state.staleness import AdmissionState
from slime_plugins.rollout_buffer.state.transcripts import encode_failed_attempt
from slime_plugins.rollout_buffer.storage.payload_store import PayloadStore
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    clock_rows,
    delivery_rows,
    group_rows,
    job_rows,
    plan_rows,
    service_rows,
    trajectory_rows,
    turn_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.input_rows import pack_input
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import (
    AckResult,
    AttemptState,
    EngineReport,
    GroupState,
    Instance,
    JobState,
    Trajectory,
    WriteStatus,
)
from slime_plugins.rollout_buffer.wire.delivery_replies import Acknowledged, MetaInfo, ShortGroup, WriteResult
from slime_plugins.rollout_buffer.wire.job_settings import JobSettings
from slime_plugins.rollout_buffer.wire.poll_requests import MAX_WAIT_S, PollPayload
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from slime_plugins.rollout_buffer.wire.written_items import WrittenItem

logger = logging.getLogger(__name__)

MAX_GAP_BETWEEN_POLLS_S = MAX_WAIT_S + 30.0
"""A trainer that waits for groups polls again after ``MAX_WAIT_S`` at most: during a longer gap it does not wait."""


@dataclass(frozen=True, slots=True)
class WaitingGroups:
    """The numbers of a job's groups that wait for the trainer."""

    ready: int
    leased: int

    @property
    def total(self) -> int:
        """Number of ready and leased groups."""
        return self.ready + self.leased


class Buffer:
    """State changes of jobs, groups, trajectories and deliveries. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] | None = None) -> None:
        """``clock`` returns seconds since the epoch; the default is the store's clock."""
        self.store = store
        self.clock = clock or store.clock
        self.payloads = PayloadStore(store, clock=self.clock)
        self._delivered_members = DeliveredMembers(store, self.payloads)
        self._item_writer = ItemWriter(store, self.payloads, clock=self.clock)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, payload: StartPayload, instances: Sequence[Instance]) -> StartedJob:
        """Starts a job, or attaches to the job that the payload names.

        Attaching takes over the payload's engine URL and changeable settings; with a skip list, delivered groups
        outside of the list become ready again. A repeated ``start_id`` changes nothing. A trainer (a payload with a
        skip list) takes over a job that writers have filled and no trainer has started, also with ``fresh``.

        Raises:
            ConflictError: as ``job_start.decide_start``.
            StorageFullError: the disk is full, or the quota used up.
        """
        pack = functools.cache(lambda: pack_input(instances) if instances else None)
        with self.store.read() as connection:
            start = job_start.decide_start(connection, payload)  # decided again in the transaction below
        if start.action is StartAction.CREATE:
            self.store.check_room()
        if start.keeps_input:
            pack()  # outside of the transaction, so that it does not block other writers
        with self.store.write() as connection:
            return job_start.start_job(connection, self.clock(), payload, pack)

    def job(self, job_id: str) -> JobRecord:
        """Returns a job.

        Raises:
            NotFoundError: there is no job of that id.
        """
        with self.store.read() as connection:
            return job_lookup.find_job(connection, job_id)

    def job_settings(self, job: JobRecord) -> JobSettings:
        """Returns the settings of a job, with the options of its generator."""
        with self.store.read() as connection:
            options = job_rows.options_of(connection, job.key)
        return JobSettings.model_validate({**job.settings.all_values, **options})

    def jobs(self) -> list[JobRecord]:
        """Returns every job, newest first."""
        with self.store.read() as connection:
            return job_rows.all_jobs(connection)

    def last_job(self) -> JobRecord | None:
        """Returns the newest job; None when there was none yet."""
        with self.store.read() as connection:
            return job_rows.last_job(connection)

    def unfinished_jobs(self) -> list[JobRecord]:
        """Returns jobs that are running or paused, oldest first."""
        with self.store.read() as connection:
            return job_rows.jobs_in_states(connection, job_states.OPEN_STATES)

    def change_job(self, job_id: str, verb: str) -> JobRecord:
        """Pauses, resumes or cancels a job; doing it twice changes nothing.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: the job's state does not allow it.
        """
        with self.store.write() as connection:
            job = job_lookup.find_job(connection, job_id)
            target = job_states.next_state(job.state, verb)
            if target is not JobState.CANCELLED:
                set_state(connection, self.clock(), job, target)
            elif job.state is not target:
                cancel_job(connection, self.clock(), job.key, CANCELLED)
            return job_rows.get_job(connection, job.key)

    def drain_job(self, job_id: str, *, stop: bool = False) -> JobRecord:
        """Pauses a job: no attempt begins after this. Running attempts are completed or, with ``stop``, given up.

        Attempts that were given up are played again after ``resume``. Does nothing to a job in a final state.

        Raises:
            NotFoundError: there is no such job.
        """
        with self.store.write() as connection:
            job = job_lookup.find_job(connection, job_id)
            if job.state in job_states.OPEN_STATES:
                state = job_states.next_state(job.state, "drain")
                set_state(connection, self.clock(), job, state, STOPPED if stop else NO_CAUSE)
            return job_rows.get_job(connection, job.key)

    def pause_for_engine(self, fence: int, job_key: int, trouble: str) -> None:
        """Pauses a running job whose engine cannot be used; ``trouble`` is a predicate, like "does not answer".

        Raises:
            StaleAttemptError: another runner has taken over the job.
        """
        with self.store.write() as connection:
            attempts.check_fence(connection, job_key, fence)
            job = job_rows.get_job(connection, job_key)
            if job.state is JobState.RUNNING:
                set_state(connection, self.clock(), job, JobState.PAUSED, engine_away(redacted(trouble)))

    def resume_for_engine(self, fence: int, job_key: int) -> None:
        """Resumes a job that was paused because of its engine; does nothing to a job that was paused otherwise.

        Raises:
            StaleAttemptError: another runner has taken over the job.
        """
        with self.store.write() as connection:
            attempts.check_fence(connection, job_key, fence)
            job = job_rows.get_job(connection, job_key)
            if job.state is JobState.PAUSED and job.cause_code is CauseCode.ENGINE_AWAY:
                set_state(connection, self.clock(), job, JobState.RUNNING)

    def fail_job(
        self, job_key: int, cause: str, code: CauseCode = CauseCode.NOT_PLAYED, *, fence: int | None = None
    ) -> None:
        """Fails a running or paused job. Its open groups stay open: a start that attaches to the job plays them.

        Raises:
            StaleAttemptError: ``fence`` is given and another runner has taken over the job.
        """
        with self.store.write() as connection:
            if fence is not None:
                attempts.check_fence(connection, job_key, fence)
            job = job_rows.get_job(connection, job_key)
            if job.state in job_states.OPEN_STATES:
                end_job(connection, self.clock(), job_key, JobState.FAILED, Cause(code, redacted(cause)))

    def stop_failing_job(self, fence: int, job_key: int, limit: int) -> None:
        """Fails a job in which its runner counted ``limit`` failed attempts in a row with one error code.

        A start that attaches to the job tries the slots of these attempts again.

        Raises:
            StaleAttemptError: another runner has taken over the job.
        """
        with self.store.read() as connection:
            failures = attempt_rows.failed_attempts(connection, job_key)
        message = "attempts failed" if failures is None else failures.sentence()
        cause = f"{message}; stopped after {limit} failures of one kind in a row (stop_after_failures)"
        self.fail_job(job_key, cause, CauseCode.ATTEMPTS_FAILED, fence=fence)

    def finish_if_done(self, job_key: int) -> bool:
        """Puts a job whose groups are all closed into its final state; returns True if the job is in a final state.

        The job is finished, or failed with a cause if groups failed and none could be delivered. A job without
        input does not finish by itself: its next item may name a new instance.
        """
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            if job.state not in job_states.OPEN_STATES:
                return True
            if not job.has_input or delivery_rows.has_groups(connection, job_key, GroupState.OPEN):
                return False
            state, cause = job_states.ending_of(
                group_rows.count_groups(connection, job_key),
                group_rows.most_frequent_causes(connection, job_key),
                attempt_rows.failed_attempts(connection, job_key),
            )
            end_job(connection, self.clock(), job_key, state, cause)
            return True

    # --- runners -----------------------------------------------------------------------------------------------------

    def begin_running(self, job_key: int, *, takes_items: bool = False) -> int:
        """Makes the caller the only runner of a job and returns its fencing number; earlier runners are fenced off.

        ``takes_items`` is True if the job's generator writes items over HTTP instead of playing slots.
        """
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            attempt_rows.give_up_running_attempts(connection, job_key, self.clock())
            takes_items = takes_items or not job.has_runner
            job_rows.update_job(
                connection, job_key, fence=job.fence + 1, takes_items=takes_items, updated_at=self.clock()
            )
            return job.fence + 1

    def job_by_key(self, job_key: int) -> JobRecord:
        """Returns a job by its key."""
        with self.store.read() as connection:
            return job_rows.get_job(connection, job_key)

    def open_groups(self, job_key: int, *, after: tuple[int, int], limit: int) -> list[GroupRecord]:
        """Returns up to ``limit`` open groups that follow ``after`` (epoch, position) in playing order.

        Opens the job's next groups if fewer have rows.
        """
        with self.store.read() as connection:
            groups = group_rows.open_groups(connection, job_key, after=after, limit=limit)
            plan = plan_rows.find_plan(connection, job_key)
        if len(groups) == limit or plan is None or not plan.unopened:
            return groups
        with self.store.write() as connection:
            group_opening.open_next(connection, job_key, limit)
            return group_rows.open_groups(connection, job_key, after=after, limit=limit)

    def started_groups(self, job_key: int) -> list[GroupRecord]:
        """Returns the open groups of a job that have an attempt or an item, oldest first.

        The list is empty for a job whose staleness policy is not ``admit``.
        """
        with self.store.read() as connection:
            if not staleness.admits(job_rows.get_job(connection, job_key)):
                return []
            return group_rows.started_open_groups(connection, job_key)

    def instance(self, group: GroupRecord) -> Instance:
        """Returns the instance of a group."""
        with self.store.read() as connection:
            return group_opening.instance_of(connection, group)

    def check_instance(self, job: JobRecord, instance_id: str) -> None:
        """Checks that a job takes items of an instance.

        Raises:
            ConflictError: the job has no such instance.
        """
        with self.store.read() as connection:
            groups_of_known_instance(connection, job, instance_id)

    def closed_instance_ids(self, job_key: int) -> list[str]:
        """Returns the instance id of each closed group: a generator that writes its items over HTTP skips these."""
        with self.store.read() as connection:
            groups = group_rows.known_groups(connection, job_key)
        return [group.instance_id for group in groups if group.state is not GroupState.OPEN]

    def slot_progress(self, group_key: int) -> dict[int, tuple[bool, int]]:
        """Returns (is filled, number of failed attempts) of each slot with an attempt or a trajectory."""
        with self.store.read() as connection:
            uses = attempt_rows.slot_uses(connection, group_key)
        return {slot: (use.filled, use.failures) for slot, use in uses.items()}

    def waiting_groups(self, job_key: int) -> WaitingGroups:
        """Counts groups that wait for the trainer."""
        with self.store.read() as connection:
            return WaitingGroups(*delivery_rows.count_ready_and_leased(connection, job_key))

    def admission_state(self, job_key: int, *, running: int) -> AdmissionState | None:
        """Returns the inputs of admission for a group that would begin now; None if the job does not admit by lag.

        ``running`` is the caller's count of running groups.
        """
        with self.store.read() as connection:
            job = job_rows.get_job(connection, job_key)
            return staleness.admission_state(connection, self.clock(), job, running=running)

    def count_trajectories(self, job_key: int) -> int:
        """Counts the trajectories of a job, including late ones."""
        with self.store.read() as connection:
            return trajectory_rows.count_trajectories(connection, job_key)

    def begin_attempt(self, fence: int, group: GroupRecord, slot: int) -> int | None:
        """Begins an attempt to fill a slot and returns its number; None if the group is not open any more.

        Raises:
            StaleAttemptError: another runner has taken over the job, or the job is in a final state.
            JobPausedError: the job is paused.
        """
        with self.store.write() as connection:
            return attempts.begin_attempt(connection, self.clock(), fence, group, slot)

    def add_trajectory(
        self, fence: int, group: GroupRecord, slot: int, attempt: int, trajectory: Trajectory, *, turns: int = 0
    ) -> WriteResult:
        """Stores the trajectory of an attempt in place of its ``turns`` stored turns.

        A trajectory whose uid is stored already is not stored again: the status of the result is ``DUPLICATE``.

        Raises:
            StaleAttemptError: the attempt was given up, or another runner has taken over the job.
            UnavailableError: the attempt has more or fewer stored turns than ``turns``: another process added one.
        """
        result = attempts.AttemptResult(
            fence=fence, group=group, slot=slot, attempt=attempt, trajectory=trajectory, turns=turns
        )
        pending = attempts.pending_payload(trajectory)
        if pending.needs_pack:
            with self.store.read() as connection:
                # Checked before its payload is stored: a refused trajectory must not use disk space.
                if attempts.is_duplicate(connection, result):
                    return WriteResult(uid=trajectory.uid, status=WriteStatus.DUPLICATE)
                self.payloads.check_named(connection, pending)
        (payload,) = self.payloads.store([pending])
        return self.store.commit(lambda connection: attempts.add_trajectory(connection, self.clock(), result, payload))

    def fail_attempt(
        self,
        fence: int,
        group: GroupRecord,
        slot: int,
        attempt: int,
        failure: AttemptFailure,
        *,
        within: Connection | None = None,
    ) -> None:
        """Ends an attempt without a trajectory and without a reward.

        ``within`` is the open transaction to use; None opens a new one.

        Raises:
            StaleAttemptError: another runner has taken over the job.
        """
        state = AttemptState.GIVEN_UP if failure.given_up else AttemptState.FAILED
        error = (failure.code, redacted(failure.message)[:2000])
        transcript = b"" if failure.given_up else encode_failed_attempt(failure.transcript, redacted(failure.traceback))
        with self.store.write() if within is None else nullcontext(within) as connection:
            attempts.check_fence(connection, group.job_key, fence)
            attempts.end_running_attempt(connection, self.clock(), group, slot, attempt, state, error, transcript)

    def open_groups_with_items(self, job_key: int) -> list[tuple[GroupRecord, int]]:
        """Returns open groups with a written item, each with its number of members."""
        with self.store.read() as connection:
            groups = group_rows.open_groups_with_items(connection, job_key)
            return [(group, trajectory_rows.count_members(connection, group.key)) for group in groups]

    def judge_and_close(
        self,
        group: GroupRecord,
        policy: GroupPolicy,
        functions: GroupFunctions | None = None,
        *,
        shortfall: Shortfall = Shortfall.SLOTS_FAILED,
        fence: int | None = None,
    ) -> Verdict | None:
        """Judges an open group by its members, closes it and returns the verdict; None if it is closed already.

        ``functions`` are a generator's own group functions; the result of its ``get_group_data_meta_info`` is part of
        the next delivery. ``shortfall`` is the reason for missing members.

        Raises:
            StaleAttemptError: ``fence`` is given and another runner has taken over the job.
        """

        def check(connection: Connection) -> None:
            if fence is not None:
                attempts.check_fence(connection, group.job_key, fence)

        if functions is not None:
            return judge_and_close_outside(
                self.store, self.clock, group, policy, functions, shortfall=shortfall, check=check
            )
        with self.store.write() as connection:
            check(connection)
            return judge_and_close(connection, self.clock(), group.key, policy, shortfall=shortfall)

    # --- writes over HTTP --------------------------------------------------------------------------------------------

    def write_items(self, job_id: str | None, items: Sequence[WrittenItem]) -> Written:
        """Stores the items of one request, all or none; raises the error that ``write_together`` would return."""
        (outcome,) = self._item_writer.write([Write(job_id, items)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def write_together(self, writes: Sequence[Write]) -> list[Written | Exception]:
        """Stores the items of several requests with one fsync; returns the result or error of each."""
        return self._item_writer.write(writes)

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Counts refused items in their jobs, if that can be stored."""
        with suppress(StorageFullError, UnavailableError):
            self._item_writer.note_refusals(refusals)

    # --- delivery ----------------------------------------------------------------------------------------------------

    def resolve_job(self, job_id: str | None, ack: Sequence[str] = ()) -> tuple[JobRecord | None, Acknowledged | None]:
        """Acknowledges deliveries; returns the job that a poll names, and the results of the acknowledgements.

        A poll that names no job gets the only job that is open or has undelivered groups, None if there is no such job.

        Raises:
            NotFoundError: there is no job of that id; nothing is acknowledged.
            ConflictError: no id was given, and several jobs are open or have undelivered groups; nothing is
                acknowledged.
        """
        with self.store.write() if ack else self.store.read() as connection:
            acknowledged = self._acknowledge(connection, ack) if ack else None
            if job_id is not None:
                return job_lookup.find_job(connection, job_id), acknowledged
            candidates = job_rows.jobs_with_groups_for_a_trainer(connection)
            if len(candidates) > 1:
                raise job_lookup.several_jobs(candidates, "are open or have undelivered groups")
            return (candidates[0] if candidates else None), acknowledged

    def take(self, job: JobRecord, poll: PollPayload) -> Delivery | None:
        """Delivers ready groups, whole and oldest first; None if no group is ready.

        With ``lease_s`` they are leased until they are acknowledged; without, they count as delivered. A repeated
        (consumer_id, poll_id) gets the same delivery; any other poll gets an expired delivery unchanged under a new id.
        """
        with self.store.write() as connection:
            return deliveries.take(connection, self.clock(), job_rows.get_job(connection, job.key), poll)

    def would_deliver(self, job: JobRecord, poll: PollPayload) -> bool:
        """Returns True if ``take`` would probably deliver groups; cheaper than ``take``."""
        with self.store.read() as connection:
            if delivery_rows.ready_groups(connection, job.key, 1):
                current = job_rows.get_job(connection, job.key)
                if not staleness.waits_for_stragglers(connection, self.clock(), current):
                    return True
            if poll.consumer_id is not None and poll.poll_id is not None:
                repeated = delivery_rows.delivery_of_poll(connection, job.key, poll.consumer_id, poll.poll_id)
                return repeated is not None
            return False

    def is_over(self, job: JobRecord) -> bool:
        """Returns True if the job is in a final state and has no ready or leased groups: a poll need not wait."""
        with self.store.read() as connection:
            final = job_rows.get_job(connection, job.key).state in job_states.FINAL_STATES
            return final and not delivery_rows.has_groups(connection, job.key, GroupState.READY, GroupState.LEASED)

    def empty_meta_info(self, job: JobRecord | None) -> MetaInfo:
        """Returns the ``meta_info`` of a reply without groups."""
        with self.store.read() as connection:
            current = None if job is None else job_rows.get_job(connection, job.key)
            return delivery_meta.empty_meta_info(connection, current)

    def groups_and_causes(self, job_key: int) -> tuple[dict[GroupState, int], dict[str, dict[str, int]]]:
        """Counts a job's groups by state, and its filtered and failed groups by state and cause."""
        with self.store.read() as connection:
            return group_rows.count_groups(connection, job_key), group_rows.count_causes(connection, job_key)

    def note_poll(self, job: JobRecord) -> None:
        """Records the time of a trainer's poll; resumes a job that was paused because no trainer polled it."""
        with self.store.write() as connection:
            job_rows.update_job(connection, job.key, last_poll_at=self.clock())
            current = job_rows.get_job(connection, job.key)
            if current.state is JobState.PAUSED and current.cause_code is CauseCode.IDLE:
                set_state(connection, self.clock(), current, JobState.RUNNING)

    def note_empty_poll(self, job: JobRecord) -> None:
        """Records the time since which polls have brought no groups. A gap of more than ``MAX_GAP_BETWEEN_POLLS_S``
        between two polls restarts that time. ``job`` was read before this poll was noted."""
        was_away = self.clock() - (job.last_poll_at or 0.0) > MAX_GAP_BETWEEN_POLLS_S
        if job.waiting_since is None or was_away:
            with self.store.write() as connection:
                job_rows.update_job(connection, job.key, waiting_since=self.clock())

    def pause_idle_jobs(self) -> list[str]:
        """Pauses jobs with undelivered groups that no trainer has polled for ``pause_when_idle_s``, to free their
        devices; returns the ids of the paused jobs. Each job is one transaction."""
        paused = []
        for job in self.unfinished_jobs():
            if not (self._is_idle(job) and self.waiting_groups(job.key).total):
                continue
            with self.store.write() as connection:
                # A poll, or a call that ends the job, may have come since the job was read.
                current = job_rows.get_job(connection, job.key)
                if self._is_idle(current):
                    set_state(connection, self.clock(), current, JobState.PAUSED, IDLE)
                    paused.append(job.job_id)
        return paused

    def _is_idle(self, job: JobRecord) -> bool:
        limit_s = job.settings.pause_when_idle_s
        if not job.has_runner or job.state is not JobState.RUNNING or limit_s is None:
            return False
        return self.clock() - max(job.last_poll_at or 0.0, job.updated_at) > limit_s

    def delivered_pieces(
        self, delivery: Delivery, *, inline_images: bool
    ) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yields the members of a delivery as (keys from their rows, payload JSON in pieces that need not be joined).

        A member whose payload is missing or damaged is a dummy with the error.
        """
        return self._delivered_members.items(delivery.key, inline_images=inline_images)

    def played_pieces(
        self, delivery: Delivery, short_groups: list[ShortGroup], *, inline_images: bool
    ) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """As ``delivered_pieces`` without dummies; appends groups with missing members to ``short_groups``.

        A group with fewer members than ``min_valid_item_size_ratio`` requires is left out and fails: damaged payloads
        are detected only when they are read.
        """
        with self.store.read() as connection:
            policy = job_lookup.group_policy(
                job_rows.get_job(connection, delivery_rows.job_of(connection, delivery.key))
            )
        members = self.delivered_pieces(delivery, inline_images=inline_images)
        for played, short in only_played(members, policy.at_least(policy.min_valid_item_size_ratio)):
            if short is not None:
                short_groups.append(short)
                if not short["delivered"]:
                    self._fail_left_out_group(short["group_index"])
            yield from played

    def _fail_left_out_group(self, group_key: int) -> None:
        """Fails a group of a delivery, if that can be written."""
        try:
            with self.store.write() as connection:
                group_rows.update_group(connection, group_key, state=GroupState.FAILED.value, **DAMAGED.columns())
        except (StorageFullError, UnavailableError) as failure:
            logger.error(
                "group %d was left out of a reply, but could not be marked as failed: %s", group_key, failure.message
            )

    def acknowledge(self, delivery_ids: Sequence[str]) -> Acknowledged:
        """Acknowledges deliveries; idempotent. Returns the ids by ``AckResult``."""
        with self.store.write() as connection:
            return self._acknowledge(connection, delivery_ids)

    def _acknowledge(self, connection: Connection, delivery_ids: Sequence[str]) -> Acknowledged:
        ids: dict[AckResult, list[str]] = {result: [] for result in AckResult}
        delivery_leases.expire_leases(connection, self.clock())
        for delivery_id in delivery_ids:
            ids[delivery_leases.acknowledge(connection, delivery_id)].append(delivery_id)
        return Acknowledged(acked=ids[AckResult.ACKED], expired=ids[AckResult.EXPIRED], unknown=ids[AckResult.UNKNOWN])

    def expire_leases(self) -> None:
        """Makes groups whose lease has run out ready again.

        A lease whose remaining time exceeds its length was granted before the clock was set back: it is shortened.
        """
        with self.store.write() as connection:
            delivery_rows.shorten_leases(connection, self.clock())
            delivery_leases.expire_leases(connection, self.clock())

    # --- the clock ---------------------------------------------------------------------------------------------------

    def follow_clock(self) -> float:
        """Shifts stored times by a jump of the machine's clock, so that the jump expires no lease or timeout; returns
        the seconds.

        The supervisor calls it a few times a second. Until it has done so, all processes subtract the jump from the
        time.
        """
        if jump := self.store.clock.jump_s():
            with self.store.write() as connection:
                clock_rows.move_times(connection, jump, self.store.clock() + jump)
            logger.warning("the machine's clock jumped by %.0f s: leases and timeouts are moved by this jump", jump)
        self.store.clock.store_reference()
        return jump

    def timed_out_groups(self, job: JobRecord) -> list[GroupRecord]:
        """Returns the open groups of a running job with a trajectory, and no write or attempt within the group timeout.

        An open session of a running gateway stops the timeout. A runner's attempt restarts it at its beginning and end.
        """
        if job.group_timeout_s is None or job.state is not JobState.RUNNING:
            return []
        now = self.clock()
        with self.store.read() as connection:
            beats = [] if job.has_runner else service_rows.heartbeats(connection, GATEWAY.name)
            is_alive = any(not GATEWAY.is_silent(abs(now - beat_at)) for beat_at, _ in beats)
            gateway_seen_at = now if is_alive else max((beat_at for beat_at, _ in beats), default=0.0)
            instances_in_use = turn_rows.instances_of_open_rollouts(connection, job.job_id, now) if is_alive else set()
            quiet = group_rows.idle_groups(connection, job.key, now - job.group_timeout_s, gateway_seen_at)
        if None in instances_in_use:  # a rollout whose instance is not known yet may be of any group
            return []
        return [group for group in quiet if group.instance_id not in instances_in_use]

    def close_timed_out_groups(self) -> int:
        """Closes timed-out groups of external jobs, each in one transaction; returns their number.

        Runners close the timed-out groups of their jobs.
        """
        closed = 0
        for job in self.unfinished_jobs():
            if job.has_runner:
                continue
            policy = job_lookup.group_policy(job)
            for group in self.timed_out_groups(job):
                if self.judge_and_close(group, policy, shortfall=Shortfall.TIMED_OUT) is not None:
                    closed += 1
        return closed

    def restart_group_clocks(self) -> None:
        """Restarts the group timeouts of external jobs, after a time without a server."""
        with self.store.write() as connection:
            for job in job_rows.jobs_in_states(connection, job_states.OPEN_STATES):
                if not job.has_runner:
                    group_rows.restart_group_clocks(connection, job.key, self.clock())

    def resume_sessions(self) -> None:
        """Restarts the idle timeouts of gateway sessions, after a time without a gateway.

        Closes the full groups that an earlier version left open when it was killed.
        """
        with self.store.write() as connection:
            attempt_rows.touch_all(connection, self.clock())
            for job in job_rows.jobs_in_states(connection, job_states.OPEN_STATES):
                close_full_groups(connection, self.clock(), job)

    def beat(self, name: str, pid: int, detail: Mapping[str, Any]) -> None:
        """Stores a heartbeat of a process, with its report."""
        with self.store.write() as connection:
            service_rows.beat(connection, name, pid, self.clock(), dict(detail))

    def report_engine(self, job_key: int, pid: int, report: EngineReport) -> None:
        """Stores the state of a job's engine, as the process ``pid`` sees it, which sends it requests."""
        self.beat(ENGINE.of_job(job_key), pid, {"engine": asdict(report)})

    def keep_prompt_findings(self, job_key: int, pid: int, findings: Sequence[str]) -> None:
        """Stores the findings of the prompt probe, which complete sentences that begin with "the engine"."""
        self.beat(PROMPTS.of_job(job_key), pid, {"findings": list(findings)})

    def remove_heartbeat(self, name: str) -> None:
        """Removes the heartbeat of a stopped process."""
        with self.store.write() as connection:
            service_rows.remove(connection, name)

    def heartbeat(self, name: str) -> tuple[float, dict[str, Any]] | None:
        """Returns (age in seconds, report) of a process's last heartbeat.

        A heartbeat in the future (the clock was set back) counts as that many seconds old: a living process soon sends
        another.
        """
        with self.store.read() as connection:
            beat = service_rows.heartbeat(connection, name)
        return None if beat is None else (abs(self.clock() - beat[0]), beat[1])
