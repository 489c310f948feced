"""The one owner of state changes. Every method that changes something is one transaction of the store.

    start_job            a payload becomes a job, or attaches to one
    begin_attempt        a runner starts to fill a slot; the number fences late results
    add_trajectory       a runner's result, idempotent by uid and fenced
    write_items          results that come over HTTP, from any generator anywhere
    judge_and_close      a group's verdict, once
    take / acknowledge   groups go out under a lease, and are delivered when that is acknowledged
    expire_leases        what was not acknowledged in time comes back

Servers, runners and the supervisor each hold a ``Buffer`` of their own on the same store.
"""

from __future__ import annotations

if (
    __name__ == "__main__"
):  # ``python buffer.py``, as slime's users start it: serves, from where ``types.py`` hides nothing
    import os
    import sys

    os.environ["PYTHONPATH"] = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
    os.execv(sys.executable, [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", *sys.argv[1:]])

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.redaction import redacted
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
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.delivery_reader import DeliveredMembers, only_played
from slime_plugins.rollout_buffer.state.group_closing import judge_and_close, judge_and_close_outside
from slime_plugins.rollout_buffer.state.item_writes import ItemWriter, Refusal, Write, Written
from slime_plugins.rollout_buffer.state.job_end import cancel_job, end_job
from slime_plugins.rollout_buffer.state.job_start import StartedJob, Way
from slime_plugins.rollout_buffer.state.staleness import Outlook
from slime_plugins.rollout_buffer.state.trainer_reports import store_report
from slime_plugins.rollout_buffer.state.transcripts import encode_kept
from slime_plugins.rollout_buffer.storage.payload_store import PayloadStore
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    clock_rows,
    delivery_rows,
    group_rows,
    job_rows,
    payload_rows,
    plan_rows,
    service_rows,
    trajectory_rows,
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
    Message,
    Trajectory,
    WriteStatus,
)
from slime_plugins.rollout_buffer.wire.delivery_replies import Acknowledged, MetaInfo, ShortGroup, WriteResult
from slime_plugins.rollout_buffer.wire.delivery_requests import MAX_WAIT_S, PollPayload
from slime_plugins.rollout_buffer.wire.start_request import JobSettings, StartPayload
from slime_plugins.rollout_buffer.wire.trainer_reports import TrainerReport
from slime_plugins.rollout_buffer.wire.trajectory_replies import TrainerRowsKept

logger = logging.getLogger(__name__)

MAX_GAP_BETWEEN_POLLS_S = MAX_WAIT_S + 30.0
"""A trainer that was silent for longer was not waiting."""


@dataclass(frozen=True, slots=True)
class WaitingGroups:
    """How many groups of a job wait for the trainer."""

    ready: int
    leased: int

    @property
    def total(self) -> int:
        """Ready and leased ones."""
        return self.ready + self.leased


class Buffer:
    """All that may happen to jobs, groups, trajectories and deliveries. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] | None = None) -> None:
        """``clock`` gives seconds since the epoch; without one, all processes go by the store's."""
        self.store = store
        self.clock = self._clock = clock or store.clock
        self.contents = PayloadStore(store, clock=self._clock)
        self._delivered = DeliveredMembers(store, self.contents)
        self._item_writer = ItemWriter(store, self.contents, clock=self._clock)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, payload: StartPayload, instances: Sequence[Instance]) -> StartedJob:
        """Makes a payload a job, or attaches to the job it names.

        Attaching takes over the new engine URL and, when the payload brings a skip list, makes what was handed out but
        not consumed ready again. The same ``start_id`` twice changes nothing the second time, however late. A trainer
        (who brings a skip list) takes over what was written to a job that no trainer has started, also with ``fresh``.

        Raises:
            ConflictError: a job of that id exists and is a different one.
            StorageFullError: the disk, or its quota, has no room for it.
        """
        pack = functools.cache(lambda: pack_input(instances) if instances else None)
        with self.store.read() as connection:
            start = job_start.decide_start(connection, payload)
        if start.way is Way.CREATE:
            self.store.check_room()
        if start.keeps_input:
            pack()  # before the transaction: others write meanwhile
        with self.store.write() as connection:
            return job_start.start_job(connection, self._clock(), payload, pack)

    def job(self, job_id: str) -> JobRecord:
        """Returns a job.

        Raises:
            NotFoundError: there is none of that id.
        """
        with self.store.read() as connection:
            return job_lookup.find_job(connection, job_id)

    def job_settings(self, job: JobRecord) -> JobSettings:
        """Returns what a job is played by: its settings, and the options of its generator."""
        with self.store.read() as connection:
            options = job_rows.options_of(connection, job.key)
        return JobSettings.model_validate({**job.settings.kept, **options})

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
            ConflictError: the job is already over in another way.
        """
        with self.store.write() as connection:
            job = job_lookup.find_job(connection, job_id)
            target = job_states.next_state(job.state, verb)
            if target is JobState.CANCELLED and job.state is not target:
                cancel_job(connection, self._clock(), job.key, CANCELLED)
            else:
                if job.state is JobState.PAUSED and target is JobState.RUNNING:
                    group_rows.restart_group_clocks(connection, job.key, self._clock())
                cause = NO_CAUSE.columns() if target in job_states.OPEN_STATES else {}  # who asks for it owns it now
                job_rows.update_job(connection, job.key, state=target.value, updated_at=self._clock(), **cause)
            return job_rows.get_job(connection, job.key)

    def drain_job(self, job_id: str, *, stop: bool = False) -> JobRecord:
        """Pauses a job: no attempt begins after this. Those that run come to their end or, with ``stop``, are ended.

        What was ended is played again after ``resume``. A job that is over is drained already.

        Raises:
            NotFoundError: there is no such job.
        """
        with self.store.write() as connection:
            job = job_lookup.find_job(connection, job_id)
            if job.state in job_states.OPEN_STATES:
                state, cause = job_states.next_state(job.state, "drain"), STOPPED if stop else NO_CAUSE
                job_rows.update_job(connection, job.key, state=state.value, updated_at=self._clock(), **cause.columns())
            return job_rows.get_job(connection, job.key)

    def pause_for_engine(self, fence: int, job_key: int, refusal: str) -> None:
        """Pauses a running job whose engine answers nobody; ``refusal`` is what it does, said behind "the engine"."""
        cause = engine_away(redacted(refusal))
        self._change_for_engine(fence, job_key, JobState.RUNNING, JobState.PAUSED, cause)

    def resume_for_engine(self, fence: int, job_key: int) -> None:
        """Lets a job go on that was paused because of its engine; the pause of somebody else stays."""
        self._change_for_engine(fence, job_key, JobState.PAUSED, JobState.RUNNING, NO_CAUSE)

    def _change_for_engine(self, fence: int, job_key: int, current: JobState, target: JobState, cause: Cause) -> None:
        with self.store.write() as connection:
            attempts.check_fence(connection, job_key, fence)
            job = job_rows.get_job(connection, job_key)
            ours = current is JobState.RUNNING or job.cause_code is CauseCode.ENGINE_AWAY
            if job.state is not current or not ours:
                return
            if target is JobState.RUNNING:
                group_rows.restart_group_clocks(connection, job_key, self._clock())
            job_rows.update_job(connection, job_key, state=target.value, updated_at=self._clock(), **cause.columns())

    def fail_job(self, job_key: int, cause: str, code: CauseCode = CauseCode.NOT_PLAYED) -> None:
        """Ends a job that cannot go on. Its open groups stay open: attaching to it tries again."""
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            if job.state in job_states.OPEN_STATES:
                end_job(connection, self._clock(), job_key, JobState.FAILED, Cause(code, redacted(cause)))

    def stop_failing_job(self, job_key: int, limit: int) -> None:
        """Fails a job of which ``limit`` attempts in a row failed in one way; starting it again tries again."""
        with self.store.read() as connection:
            failures = attempt_rows.failed_attempts(connection, job_key)
        message = "attempts failed" if failures is None else failures.sentence()
        cause = f"{message}; stopped after {limit} failures of one kind in a row (stop_after_failures)"
        self.fail_job(job_key, cause, CauseCode.ATTEMPTS_FAILED)

    def finish_if_done(self, job_key: int) -> bool:
        """Ends a job whose groups are all closed and returns whether it is over.

        It is finished, or failed when groups failed and none could be delivered; its cause says what went wrong. A job
        without input never is over by itself: its next item may name a new instance.
        """
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            if job.state not in job_states.OPEN_STATES:
                return True
            fed_from_outside = not job.has_input
            if fed_from_outside or delivery_rows.has_groups(connection, job_key, GroupState.OPEN):
                return False
            state, cause = job_states.ending_of(
                group_rows.count_groups(connection, job_key),
                group_rows.most_frequent_causes(connection, job_key),
                attempt_rows.failed_attempts(connection, job_key),
            )
            end_job(connection, self._clock(), job_key, state, cause)
            return True

    # --- runners -----------------------------------------------------------------------------------------------------

    def begin_running(self, job_key: int, *, takes_items: bool = False) -> int:
        """Makes the caller the only runner of a job and returns its fencing number; earlier runners are fenced off.

        ``takes_items`` says that its generator writes its items over HTTP, instead of playing the slots one by one.
        """
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            attempt_rows.give_up_running_attempts(connection, job_key, self._clock())
            takes_items = takes_items or not job.has_runner
            job_rows.update_job(
                connection, job_key, fence=job.fence + 1, takes_items=takes_items, updated_at=self._clock()
            )
            return job.fence + 1

    def job_by_key(self, job_key: int) -> JobRecord:
        """Returns a job by its key."""
        with self.store.read() as connection:
            return job_rows.get_job(connection, job_key)

    def open_groups(self, job_key: int, *, after: tuple[int, int], limit: int) -> list[GroupRecord]:
        """Returns open groups in playing order, from the one after (epoch, position) on; opens what is needed."""
        with self.store.read() as connection:
            found = group_rows.open_groups(connection, job_key, after=after, limit=limit)
            plan = plan_rows.find_plan(connection, job_key)
        if len(found) == limit or plan is None or not plan.unopened:
            return found
        with self.store.write() as connection:
            group_opening.open_next(connection, job_key, limit)
            return group_rows.open_groups(connection, job_key, after=after, limit=limit)

    def groups_in_play(self, job_key: int) -> list[GroupRecord]:
        """Returns open groups that were begun, the oldest first, where a job keeps its lag by admission; else none."""
        with self.store.read() as connection:
            if not staleness.admits(job_rows.get_job(connection, job_key)):
                return []
            return group_rows.opened_groups(connection, job_key)

    def instance(self, group: GroupRecord) -> Instance:
        """Returns the instance of a group, with its line of the job's input."""
        with self.store.read() as connection:
            return group_opening.instance_of(connection, group)

    def skipped_instance_ids(self, job_key: int) -> list[str]:
        """Returns the ids that a plain generator is not to play, once per skipped epoch."""
        with self.store.read() as connection:
            known = group_rows.known_groups(connection, job_key)
        return [group.instance_id for group in known if group.state is GroupState.SKIPPED]

    def slot_progress(self, group_key: int) -> dict[int, tuple[bool, int]]:
        """Returns for each slot that was begun: (is filled, number of failed attempts)."""
        with self.store.read() as connection:
            return attempt_rows.slot_progress(connection, group_key)

    def waiting_groups(self, job_key: int) -> WaitingGroups:
        """Counts groups that wait for the trainer."""
        with self.store.read() as connection:
            ready = delivery_rows.count_in_state(connection, job_key, GroupState.READY)
            return WaitingGroups(ready, delivery_rows.count_in_state(connection, job_key, GroupState.LEASED))

    def outlook(self, job_key: int, *, running: int) -> Outlook | None:
        """Returns how a group would stand that begins now; None where no lag, or nothing of the trainer, forbids it."""
        with self.store.read() as connection:
            job = job_rows.get_job(connection, job_key)
            return staleness.outlook(connection, self._clock(), job, running=running)

    def count_trajectories(self, job_key: int) -> int:
        """Counts what the job was brought so far, late or not."""
        with self.store.read() as connection:
            return trajectory_rows.count_trajectories(connection, job_key)

    def begin_attempt(self, fence: int, group: GroupRecord, slot: int) -> int | None:
        """Starts to fill a slot and returns the attempt's number; None when the group is not open any more.

        Raises:
            StaleAttemptError: another runner has taken over the job, or it is over.
            JobPausedError: the job is paused: whoever drains it relies on it that nothing begins.
        """
        with self.store.write() as connection:
            return attempts.begin_attempt(connection, self._clock(), fence, group, slot)

    def add_trajectory(
        self, fence: int, group: GroupRecord, slot: int, attempt: int, trajectory: Trajectory
    ) -> WriteResult:
        """Stores what an attempt brought back. The same uid twice is one trajectory.

        Raises:
            StaleAttemptError: the attempt was given up, or another runner has taken over the job.
        """
        brought = attempts.AttemptResult(fence=fence, group=group, slot=slot, attempt=attempt, trajectory=trajectory)
        with self.store.read() as connection:
            # Before its bytes are stored: what is refused anyway takes no place on the disk.
            if attempts.is_duplicate(connection, brought):
                return WriteResult(uid=trajectory.uid, status=WriteStatus.DUPLICATE)
            pending = attempts.pending_payload(trajectory)
            self.contents.check_named(connection, pending)
        (payload,) = self.contents.store([pending])
        return self.store.commit(
            lambda connection: attempts.add_trajectory(connection, self._clock(), brought, payload)
        )

    def fail_attempt(
        self,
        fence: int,
        group: GroupRecord,
        slot: int,
        attempt: int,
        *,
        code: str,
        message: str,
        given_up: bool = False,
        transcript: Sequence[Message] = (),
        traceback: str = "",
    ) -> None:
        """Records that an attempt died of its surroundings (or, ``given_up``, was stopped). It has no reward.

        Of one that failed, ``transcript`` and ``traceback`` are kept, shortened, for people to read.
        """
        state = AttemptState.GIVEN_UP if given_up else AttemptState.FAILED
        error = (code, redacted(message)[:2000])
        kept = b"" if given_up else encode_kept(transcript, redacted(traceback))
        with self.store.write() as connection:
            attempts.check_fence(connection, group.job_key, fence)
            attempts.end_running_attempt(connection, self._clock(), group, slot, attempt, state, error, kept)

    def items_of(self, job: JobRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields every trajectory of a job as (uid, item), one at a time."""
        with self.store.read() as connection:
            known = trajectory_rows.uids_of(connection, job.key)
        for uid in known:
            with self.store.read() as connection:
                body = payload_rows.payload_of(connection, job.key, uid)
            yield uid, orjson.loads(self.store.get_payload(*body))

    def begun_open_groups(self, job_key: int) -> list[tuple[GroupRecord, int]]:
        """Returns open groups that something was written to, each with its number of members."""
        with self.store.read() as connection:
            begun = group_rows.begun_open_groups(connection, job_key)
            return [(group, trajectory_rows.count_members(connection, group.key)) for group in begun]

    def judge_and_close(
        self,
        group: GroupRecord,
        policy: GroupPolicy,
        functions: GroupFunctions | None = None,
        *,
        shortfall: Shortfall = Shortfall.SLOTS_FAILED,
        fence: int | None = None,
    ) -> Verdict | None:
        """Judges an open group by all members it has and closes it, once; None when it was closed already.

        ``functions`` are a generator's own. What its ``get_group_data_meta_info`` says is told with the next delivery.

        Raises:
            StaleAttemptError: ``fence`` is given and another runner has taken over the job.
        """

        def check(connection: Connection) -> None:
            if fence is not None:
                attempts.check_fence(connection, group.job_key, fence)

        if functions is not None:
            return judge_and_close_outside(
                self.store, self._clock, group, policy, functions, shortfall=shortfall, check=check
            )
        with self.store.write() as connection:
            check(connection)
            return judge_and_close(connection, self._clock(), group.key, policy, shortfall=shortfall)

    # --- writes over HTTP --------------------------------------------------------------------------------------------

    def write_items(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> Written:
        """Keeps items from any generator anywhere, all or none; raises what ``write_together`` puts in their place."""
        (outcome,) = self._item_writer.write([Write(job_id, items)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def write_together(self, writes: Sequence[Write]) -> list[Written | Exception]:
        """Does ``write_items`` for each, with one fsync for all; what is wrong with one stands in its place."""
        return self._item_writer.write(writes)

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Lets jobs say what was refused of what was written to them, where that can be stored."""
        with suppress(StorageFullError, UnavailableError):
            self._item_writer.note_refusals(refusals)

    # --- reports of trainers -----------------------------------------------------------------------------------------

    def add_trainer_report(self, job_id: str, report: TrainerReport) -> TrainerRowsKept:
        """Keeps what a trainer computed of the rows it trained; returns what was kept and what was refused, and why.

        Raises:
            NotFoundError, StorageFullError: as ``store_report``.
        """
        return store_report(self.store, job_id, report, clock=self._clock)

    # --- delivery ----------------------------------------------------------------------------------------------------

    def resolve_job(self, job_id: str | None) -> JobRecord | None:
        """Returns the job a poll means: the one it names, else the only one with something to come; None for none.

        Raises:
            NotFoundError: there is no job of that id.
            ConflictError: no id was given and several jobs are open.
        """
        with self.store.read() as connection:
            if job_id is not None:
                return job_lookup.find_job(connection, job_id)
            candidates = job_rows.jobs_with_groups_for_a_trainer(connection)
        if len(candidates) > 1:
            raise job_lookup.several_jobs(candidates)
        return candidates[0] if candidates else None

    def take(self, job: JobRecord, poll: PollPayload) -> Delivery | None:
        """Hands out ready groups, whole and oldest first; None when there is nothing to hand out.

        With ``lease_s`` they are leased until they are acknowledged; without, they count as delivered at once. The same
        (consumer_id, poll_id) gets the same delivery again; to any other poll, a delivery whose lease ran out comes
        back as it was under an id of its own.
        """
        with self.store.write() as connection:
            return deliveries.take(connection, self._clock(), job_rows.get_job(connection, job.key), poll)

    def has_news(self, job: JobRecord, poll: PollPayload) -> bool:
        """Tells cheaply whether ``take`` would find something."""
        with self.store.read() as connection:
            if delivery_rows.ready_groups(connection, job.key, 1):
                now = job_rows.get_job(connection, job.key)
                if not staleness.waits_for_stragglers(connection, self._clock(), now):
                    return True
            if poll.consumer_id is not None and poll.poll_id is not None:
                repeated = delivery_rows.delivery_of_poll(connection, job.key, poll.consumer_id, poll.poll_id)
                return repeated is not None
            return False

    def is_over(self, job: JobRecord) -> bool:
        """Returns True if waiting is pointless: the job is over, and nothing of it is ready or leased."""
        with self.store.read() as connection:
            final = job_rows.get_job(connection, job.key).state in job_states.FINAL_STATES
            return final and not delivery_rows.has_groups(connection, job.key, GroupState.READY, GroupState.LEASED)

    def empty_meta_info(self, job: JobRecord | None) -> MetaInfo:
        """Returns what a poll is told that gets nothing."""
        with self.store.read() as connection:
            now = None if job is None else job_rows.get_job(connection, job.key)
            return delivery_meta.empty_meta_info(connection, now)

    def polled(self, job: JobRecord) -> None:
        """Notes that a trainer asked for a job's data; a job that had paused itself goes on."""
        with self.store.write() as connection:
            job_rows.update_job(connection, job.key, last_poll_at=self._clock())
            current = job_rows.get_job(connection, job.key)
            if current.state is JobState.PAUSED and current.cause_code is CauseCode.IDLE:
                job_rows.update_job(connection, job.key, state=JobState.RUNNING.value, **NO_CAUSE.columns())

    def empty_poll(self, job: JobRecord) -> None:
        """Notes since when a trainer has polled and got nothing; who comes back after long begins to wait again."""
        gone = self._clock() - (job.last_poll_at or 0.0) > MAX_GAP_BETWEEN_POLLS_S
        if job.waiting_since is None or gone:
            with self.store.write() as connection:
                job_rows.update_job(connection, job.key, waiting_since=self._clock())

    def pause_idle_jobs(self) -> list[str]:
        """Pauses jobs whose groups nobody has asked for in ``pause_when_idle_s``: their devices are free for others."""
        paused = []
        for job in self.unfinished_jobs():
            limit_s = job.settings.pause_when_idle_s
            asked_at = job.last_poll_at or job.created_at
            if not job.has_runner or job.state is not JobState.RUNNING or limit_s is None:
                continue
            if self._clock() - asked_at > limit_s and self.waiting_groups(job.key).total:
                with self.store.write() as connection:
                    job_rows.update_job(connection, job.key, state=JobState.PAUSED.value, **IDLE.columns())
                paused.append(job.job_id)
        return paused

    def delivered_items(
        self, delivery: Delivery, *, inline_images: bool = False
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields the members of a delivery as (light keys, payload JSON), one at a time.

        A member whose bytes are gone or damaged is a dummy that says so; the others are not affected.
        """
        for light, pieces in self.delivered_pieces(delivery, inline_images=inline_images):
            yield light, b"".join(pieces)

    def delivered_pieces(
        self, delivery: Delivery, *, inline_images: bool
    ) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """As ``delivered_items``, with each payload in pieces that have not been copied together."""
        return self._delivered.items(delivery.key, inline_images=inline_images)

    def played_pieces(
        self, delivery: Delivery, short_groups: list[ShortGroup], *, inline_images: bool
    ) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """As ``delivered_pieces`` without dummies; says in ``short_groups`` which groups have fewer members for it.

        A group of which less is left than ``min_valid_item_size_ratio`` asks for is left out, and fails: that shows
        only now, when its bytes are read and found damaged.
        """
        with self.store.read() as connection:
            policy = job_lookup.group_policy(
                job_rows.get_job(connection, delivery_rows.job_of(connection, delivery.key))
            )
        members = self.delivered_pieces(delivery, inline_images=inline_images)
        for group in only_played(members, policy.at_least(policy.min_valid_item_size_ratio)):
            if group.short is not None:
                short_groups.append(group.short)
            if not group.members:
                self._leave_out(group.key)
            yield from group.members

    def with_inline_images(self, body: bytes) -> bytes:
        """Puts the screenshots that a payload names by hash into it, for clients that know only data URIs."""
        return b"".join(self.contents.inlined(body))

    def _leave_out(self, group_key: int) -> None:
        """Fails a group that was to be delivered; the delivery goes on also when that cannot be written."""
        try:
            with self.store.write() as connection:
                group_rows.update_group(connection, group_key, state=GroupState.FAILED.value, **DAMAGED.columns())
        except (StorageFullError, UnavailableError) as failure:
            logger.error("group %d was left out of a reply, and that is not noted: %s", group_key, failure.message)

    def acknowledge(self, delivery_ids: Sequence[str]) -> Acknowledged:
        """Counts deliveries as received; doing it twice changes nothing.

        Returns the ids by what they were.
        """
        result: dict[AckResult, list[str]] = {was: [] for was in AckResult}
        with self.store.write() as connection:
            delivery_leases.expire_leases(connection, self._clock())
            for delivery_id in delivery_ids:
                result[delivery_leases.acknowledge(connection, delivery_id)].append(delivery_id)
        return Acknowledged(
            acked=result[AckResult.ACKED], expired=result[AckResult.EXPIRED], unknown=result[AckResult.UNKNOWN]
        )

    def expire_leases(self) -> None:
        """Makes what was not acknowledged in time ready again.

        A lease that ends later than it can was given before the clock was set back: it begins again.
        """
        with self.store.write() as connection:
            delivery_rows.shorten_leases(connection, self._clock())
            delivery_leases.expire_leases(connection, self._clock())

    # --- the clock ---------------------------------------------------------------------------------------------------

    def follow_clock(self) -> float:
        """Goes on by the machine's clock after it was set, and nothing has aged by that; returns the seconds.

        For the supervisor, a few times a second: until it has, every process goes by the time without the jump.
        """
        if jump := self.store.clock.jump_s():
            with self.store.write() as connection:
                clock_rows.move_times(connection, jump, self.store.clock() + jump)
            logger.warning("the machine's clock was set by %.0f s: leases and timeouts go on as if it had not", jump)
        self.store.clock.mark()
        return jump

    def timed_out_groups(self, job: JobRecord) -> list[GroupRecord]:
        """Returns the begun groups of a running job that got nothing for as long as the job allows.

        An open session holds the clock while its gateway lives. A runner's attempts do not: where a limit was set for
        the groups of a job that a runner plays, it is what ends them.
        """
        if job.group_timeout_s is None or job.state is not JobState.RUNNING:
            return []
        now = self._clock()
        with self.store.read() as connection:
            beat = None if job.has_runner else service_rows.heartbeat(connection, GATEWAY.name)
            seen_at, detail = (0.0, {}) if beat is None else beat
            rollouts = []
            if not GATEWAY.is_silent(abs(now - seen_at)):
                seen_at, rollouts = now, detail.get("rollouts", [])
            quiet = group_rows.quiet_groups(connection, job.key, now - job.group_timeout_s, seen_at)
        held = {instance_id for job_id, instance_id in rollouts if job_id == job.job_id}
        return [group for group in quiet if held.isdisjoint((group.instance_id, None))]

    def close_timed_out_groups(self) -> int:
        """Closes the groups of external jobs whose time ran out; returns how many. A runner closes those of its job."""
        closed = 0
        for job in self.unfinished_jobs():
            for group in [] if job.has_runner else self.timed_out_groups(job):
                closed += (
                    self.judge_and_close(group, job_lookup.group_policy(job), shortfall=Shortfall.TIMED_OUT) is not None
                )
        return closed

    def restart_group_clocks(self) -> None:
        """Lets external groups wait again: nobody could write while no server ran."""
        with self.store.write() as connection:
            for job in job_rows.jobs_in_states(connection, job_states.OPEN_STATES):
                if not job.has_runner:
                    group_rows.restart_group_clocks(connection, job.key, self._clock())

    def beat(self, name: str, pid: int, detail: Mapping[str, Any]) -> None:
        """Says that a process lives, and what it knows."""
        with self.store.write() as connection:
            service_rows.beat(connection, name, pid, self._clock(), dict(detail))

    def report_engine(self, job_key: int, pid: int, report: EngineReport) -> None:
        """Keeps how the engine of a job is, as the process sees it that asks it for tokens."""
        self.beat(ENGINE.of_job(job_key), pid, {"engine": asdict(report)})

    def keep_prompt_findings(self, job_key: int, pid: int, findings: Sequence[str]) -> None:
        """Keeps what the engine of a job was found to do to prompts, as sentences that follow "the engine"."""
        self.beat(PROMPTS.of_job(job_key), pid, {"findings": list(findings)})

    def remove_heartbeat(self, name: str) -> None:
        """Says that a process ended in order."""
        with self.store.write() as connection:
            service_rows.remove(connection, name)

    def heartbeat(self, name: str) -> tuple[float, dict[str, Any]] | None:
        """Returns how many seconds ago a process last said that it lives, and what it said.

        A beat from the future is as old as it is far away: whoever lives beats again after the clock was set back.
        """
        with self.store.read() as connection:
            found = service_rows.heartbeat(connection, name)
        return None if found is None else (abs(self._clock() - found[0]), found[1])
