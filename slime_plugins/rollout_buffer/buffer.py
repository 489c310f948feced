"""The one owner of state changes. Every method that changes something is one transaction of the store.

    start_job            a payload becomes a job, or attaches to one
    begin_attempt        a runner starts to fill a slot; the number fences late results
    add_trajectory       a runner's result, idempotent by uid and fenced
    write_items          results that come over HTTP, from any generator anywhere
    close_group          a group's verdict, once
    take / acknowledge   groups go out under a lease, and are delivered when that is acknowledged
    expire_leases        what was not acknowledged in time comes back

Servers, runners and the supervisor each hold a ``Buffer`` of their own on the same store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from slime_plugins.rollout_buffer import deliveries, job_starts, wire
from slime_plugins.rollout_buffer import groups as group_rules
from slime_plugins.rollout_buffer import jobs as job_rules
from slime_plugins.rollout_buffer.contents import Contents, Draft, Kept
from slime_plugins.rollout_buffer.delivered import DeliveredMembers
from slime_plugins.rollout_buffer.deliveries import Delivery
from slime_plugins.rollout_buffer.episode_facts import facts_of
from slime_plugins.rollout_buffer.errors import (
    ConflictError,
    InvalidPayloadError,
    NotFoundError,
    StaleAttemptError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.groups import GroupPolicy, Member, Verdict
from slime_plugins.rollout_buffer.job_starts import StartedJob
from slime_plugins.rollout_buffer.payloads import PollPayload, StartPayload
from slime_plugins.rollout_buffer.series import job_measures
from slime_plugins.rollout_buffer.staleness import versions_of
from slime_plugins.rollout_buffer.store import Store
from slime_plugins.rollout_buffer.tables import (
    attempt_rows,
    content_rows,
    delivery_rows,
    group_rows,
    job_rows,
    service_rows,
    trajectory_rows,
)
from slime_plugins.rollout_buffer.tables.connection import Connection
from slime_plugins.rollout_buffer.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Generation, GroupState, Instance, JobState, Trajectory

__all__ = ["Buffer", "Delivery", "StartedJob", "Write", "WriteResult"]

logger = logging.getLogger(__name__)

DEFAULT_REWARD_RANGE = (0.0, 1.0)
IDLE = "nobody polls it; the next poll resumes it"
LONGEST_GAP_BETWEEN_POLLS_S = 330.0
"""A poll waits up to 300 s: a trainer that was silent for longer was not waiting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What became of an item: ``stored``, ``duplicate`` (nothing changed) or ``late`` (kept, not delivered)."""

    uid: str
    status: str


@dataclass(frozen=True, slots=True)
class Write:
    """What one request brings: items for the job it names, or for the only open one."""

    job_id: str | None
    items: Sequence[wire.WrittenItem]


Written = tuple[JobRecord, list[WriteResult]]


class Buffer:
    """All that may happen to jobs, groups, trajectories and deliveries. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since the epoch; tests pass their own."""
        self.store = store
        self.contents = Contents(store)
        self._delivered = DeliveredMembers(store, self.contents)
        self._clock = clock

    # --- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, payload: StartPayload, instances: Sequence[Instance]) -> StartedJob:
        """Makes a payload a job, or attaches to the job it names.

        Attaching takes over the new engine URL and, when the payload brings a skip list, makes what was handed out but
        not consumed ready again. The same ``start_id`` twice changes nothing the second time.

        Raises:
            ConflictError: a job of that id exists and is a different one.
        """
        with self.store.write() as connection:
            return job_starts.start_job(connection, self._clock(), payload, instances)

    def job(self, job_id: str) -> JobRecord:
        """Returns a job.

        Raises:
            NotFoundError: there is none of that id.
        """
        with self.store.read() as connection:
            return self._find(connection, job_id)

    def jobs(self) -> list[JobRecord]:
        """Returns every job, newest first."""
        with self.store.read() as connection:
            return job_rows.all_jobs(connection)

    def unfinished_jobs(self) -> list[JobRecord]:
        """Returns jobs that are running or paused, oldest first."""
        with self.store.read() as connection:
            return job_rows.jobs_in_states(connection, job_rules.OPEN_STATES)

    def change_job(self, job_id: str, verb: str) -> JobRecord:
        """Pauses, resumes or cancels a job; doing it twice changes nothing.

        Raises:
            NotFoundError: there is no such job.
            ConflictError: the job is already over in another way.
        """
        with self.store.write() as connection:
            job = self._find(connection, job_id)
            target = job_rules.next_state(job.state, verb)
            if target is JobState.CANCELLED and job.state is not target:
                job_starts.end_job(connection, self._clock(), job, target, "cancelled by request")
            else:
                if job.state is JobState.PAUSED and target is JobState.RUNNING:
                    group_rows.restart_group_clocks(connection, job.key, self._clock())
                job_rows.update_job(connection, job.key, state=target.value, updated_at=self._clock())
            return job_rows.get_job(connection, job.key)

    def fail_job(self, job_key: int, cause: str) -> None:
        """Ends a job that cannot go on. Its open groups stay open: attaching to it tries again."""
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            if job.state in job_rules.OPEN_STATES:
                now = self._clock()
                attempt_rows.give_up_running_attempts(connection, job_key, now)
                job_rows.update_job(
                    connection, job_key, state=JobState.FAILED.value, cause=cause, updated_at=now, finished_at=now
                )

    def finish_if_done(self, job_key: int) -> bool:
        """Finishes a job whose groups are all closed and returns whether it is over.

        A job without input never is by itself: its next item may name a new instance.
        """
        with self.store.write() as connection:
            job = job_rows.get_job(connection, job_key)
            if job.state not in job_rules.OPEN_STATES:
                return True
            fed_from_outside = not job.has_input
            if fed_from_outside or delivery_rows.has_groups(connection, job_key, GroupState.OPEN):
                return False
            now = self._clock()
            job_rows.update_job(connection, job_key, state=JobState.FINISHED.value, updated_at=now, finished_at=now)
            return True

    def _find(self, connection: Connection, job_id: str) -> JobRecord:
        job = job_rows.find_job(connection, job_id)
        if job is None:
            raise NotFoundError(f"there is no job {job_id[:300]!r}; GET /jobs lists them")
        return job

    # --- runners -----------------------------------------------------------------------------------------------------

    def begin_running(self, job_key: int) -> int:
        """Makes the caller the only runner of a job and returns its fencing number; earlier runners are fenced off."""
        with self.store.write() as connection:
            fence = job_rows.get_job(connection, job_key).fence + 1
            attempt_rows.give_up_running_attempts(connection, job_key, self._clock())
            job_rows.update_job(connection, job_key, fence=fence, updated_at=self._clock())
            return fence

    def job_by_key(self, job_key: int) -> JobRecord:
        """Returns a job by its key."""
        with self.store.read() as connection:
            return job_rows.get_job(connection, job_key)

    def open_groups(self, job_key: int, *, after: tuple[int, int], limit: int) -> list[GroupRecord]:
        """Returns open groups in playing order, from the one after (epoch, position) on."""
        with self.store.read() as connection:
            return group_rows.open_groups(connection, job_key, after=after, limit=limit)

    def instance(self, job_key: int, position: int) -> Instance:
        """Returns one line of the job's input."""
        with self.store.read() as connection:
            data = orjson.loads(group_rows.instance_line(connection, job_key, position))
        return Instance(instance_id=wire.identifier(data["instance_id"], "instance_id"), data=data)

    def skipped_instance_ids(self, job_key: int) -> list[str]:
        """Returns the ids that a plain generator is not to play, once per skipped epoch."""
        with self.store.read() as connection:
            known = group_rows.known_groups(connection, job_key)
        return [group.instance_id for group in known if group.state is GroupState.SKIPPED]

    def slot_progress(self, group_key: int) -> dict[int, tuple[bool, int]]:
        """Returns for each slot that was begun: (is filled, number of failed attempts)."""
        with self.store.read() as connection:
            return attempt_rows.slot_progress(connection, group_key)

    def groups_ahead(self, job_key: int) -> int:
        """Counts groups that wait for the trainer: ready or leased."""
        with self.store.read() as connection:
            return delivery_rows.count_in_state(connection, job_key, GroupState.READY, GroupState.LEASED)

    def count_trajectories(self, job_key: int) -> int:
        """Counts what the job was brought so far, late or not."""
        with self.store.read() as connection:
            return trajectory_rows.count_trajectories(connection, job_key)

    def begin_attempt(self, fence: int, group: GroupRecord, slot: int) -> int | None:
        """Starts to fill a slot and returns the attempt's number; None when the group is not open any more.

        Raises:
            StaleAttemptError: another runner has taken over the job.
        """
        with self.store.write() as connection:
            self._check_fence(connection, group.job_key, fence)
            current = group_rows.get_group(connection, group.key)
            if current.state is not GroupState.OPEN:
                return None
            now = self._clock()
            if current.opened_at is None:
                group_rows.update_group(connection, group.key, opened_at=now)
            return attempt_rows.insert_attempt(connection, group.key, slot, fence, now)

    def add_trajectory(
        self, fence: int, group: GroupRecord, slot: int, attempt: int, trajectory: Trajectory
    ) -> WriteResult:
        """Keeps what an attempt brought back. The same uid twice is one trajectory.

        Raises:
            StaleAttemptError: the attempt was given up, or another runner has taken over the job.
        """
        with self.store.read() as connection:
            # Before its bytes are kept: what is refused anyway takes no place on the disk.
            if self._is_duplicate(connection, fence, group, slot, attempt, trajectory.uid):
                return WriteResult(uid=trajectory.uid, status="duplicate")
        body = orjson.dumps(wire.encode_body(trajectory), option=orjson.OPT_NON_STR_KEYS)
        images = {image.sha256: image for image in trajectory.images}
        needs = list(dict.fromkeys([*images, *wire.image_hashes(body)]))
        (kept,) = self.contents.keep([Draft(body, needs, images, f"trajectory {trajectory.uid}")])
        return self.store.commit(
            lambda connection: self._add_trajectory(connection, fence, group, slot, attempt, trajectory, kept)
        )

    def _is_duplicate(
        self, connection: Connection, fence: int, group: GroupRecord, slot: int, attempt: int, uid: str
    ) -> bool:
        if trajectory_rows.has_trajectory(connection, group.job_key, uid):
            return True
        self._check_fence(connection, group.job_key, fence)
        if attempt_rows.attempt_state(connection, group.key, slot, attempt) != "running":
            raise StaleAttemptError(f"attempt {attempt} of slot {slot} was given up before its result came")
        return False

    def _add_trajectory(
        self,
        connection: Connection,
        fence: int,
        group: GroupRecord,
        slot: int,
        attempt: int,
        trajectory: Trajectory,
        kept: Kept,
    ) -> WriteResult:
        if self._is_duplicate(connection, fence, group, slot, attempt, trajectory.uid):
            return WriteResult(uid=trajectory.uid, status="duplicate")
        now = self._clock()
        late = group_rows.get_group(connection, group.key).state is not GroupState.OPEN
        kept.record(connection, now)
        trajectory_rows.insert_trajectory(
            connection,
            job_key=group.job_key,
            uid=trajectory.uid,
            group_key=group.key,
            slot=slot,
            attempt=attempt,
            instance_id=group.instance_id,
            outcome=trajectory.outcome.value,
            stop_reason=trajectory.stop_reason.value,
            reward=trajectory.reward,
            raw_reward=trajectory.raw_reward,
            **self._note_versions(connection, group.job_key, trajectory.generations),
            **facts_of(trajectory.extra_info, trajectory.timings_s, trajectory.generations).columns(),
            late=late,
            created_at=now,
            **kept.columns(),
        )
        attempt_rows.end_attempt(connection, group.key, slot, attempt, "finished", now, None)
        group_rows.update_group(connection, group.key, last_write_at=now)
        return WriteResult(uid=trajectory.uid, status="late" if late else "stored")

    def _note_versions(
        self, connection: Connection, job_key: int, generations: Sequence[Generation]
    ) -> dict[str, int | None]:
        """Returns the oldest weight version of a trajectory and how far it is behind; tells the job of its newest."""
        versions = versions_of(generations)
        if versions is None:
            return {"oldest_version": None, "versions_behind": None}
        newest = job_rows.raise_weight_version(connection, job_key, versions[1])
        return {"oldest_version": versions[0], "versions_behind": newest - versions[0]}

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
    ) -> None:
        """Records that an attempt died of its surroundings (or, ``given_up``, was stopped). It has no reward."""
        with self.store.write() as connection:
            self._check_fence(connection, group.job_key, fence)
            if attempt_rows.attempt_state(connection, group.key, slot, attempt) == "running":
                state = "given_up" if given_up else "failed"
                error = (code, message[:2000])
                attempt_rows.end_attempt(connection, group.key, slot, attempt, state, self._clock(), error)

    def members(self, group: GroupRecord, *, with_items: bool) -> list[Member]:
        """Returns the trajectories of a group; with their whole items for functions that need them."""
        with self.store.read() as connection:
            found = trajectory_rows.members_of(connection, group.key)
            if not with_items:
                return found
            bodies = [trajectory_rows.body_of(connection, group.job_key, member.uid) for member in found]
        return [
            replace(member, item=self._item(member, self.store.get_payload(*body)))
            for member, body in zip(found, bodies, strict=True)
        ]

    def items_of(self, job: JobRecord) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields every trajectory of a job as (uid, item), one at a time."""
        with self.store.read() as connection:
            known = trajectory_rows.uids_of(connection, job.key)
        for uid in known:
            with self.store.read() as connection:
                body = trajectory_rows.body_of(connection, job.key, uid)
            yield uid, orjson.loads(self.store.get_payload(*body))

    def _item(self, member: Member, body: bytes) -> dict[str, Any]:
        light = {"uid": member.uid, "instance_id": member.instance_id, "reward": member.reward}
        return {**light, "raw_reward": member.raw_reward, **orjson.loads(body)}

    def begun_open_groups(self, job_key: int) -> list[tuple[GroupRecord, int]]:
        """Returns open groups that something was written to, each with its number of members."""
        with self.store.read() as connection:
            begun = group_rows.begun_open_groups(connection, job_key)
            return [(group, trajectory_rows.count_members(connection, group.key)) for group in begun]

    def close_group(
        self, group: GroupRecord, verdict: Verdict, *, fence: int | None = None, judged: int | None = None
    ) -> bool:
        """Closes an open group with its verdict, once; returns False when it was closed already.

        ``judged`` is how many members the verdict knows. With another one in the meantime the group stays open, and
        False says that it is to be judged again: a member that was told "stored" is never left out.

        Raises:
            StaleAttemptError: ``fence`` is given and another runner has taken over the job.
        """
        with self.store.write() as connection:
            if fence is not None:
                self._check_fence(connection, group.job_key, fence)
            if judged is not None and trajectory_rows.count_members(connection, group.key) != judged:
                return False
            return self._close_group(connection, group.key, verdict)

    def is_open(self, group: GroupRecord) -> bool:
        """Tells whether a group still waits for its verdict."""
        with self.store.read() as connection:
            return group_rows.get_group(connection, group.key).state is GroupState.OPEN

    def _close_group(self, connection: Connection, group_key: int, verdict: Verdict) -> bool:
        if group_rows.get_group(connection, group_key).state is not GroupState.OPEN:
            return False
        ready = verdict.state is GroupState.READY
        group_rows.update_group(
            connection,
            group_key,
            state=verdict.state.value,
            cause=verdict.cause[:500],
            closed_at=self._clock(),
            sequence=group_rows.next_sequence(connection) if ready else None,
        )
        if ready:
            trajectory_rows.insert_members(connection, group_key, verdict.members)
        return True

    def set_meta_info(self, job_key: int, meta_info: Mapping[str, Any]) -> None:
        """Keeps what a generator's own ``get_group_data_meta_info`` said last; the next delivery carries it."""
        with self.store.write() as connection:
            job_rows.update_job(connection, job_key, meta_info=orjson.dumps(dict(meta_info)).decode())

    def _check_fence(self, connection: Connection, job_key: int, fence: int) -> None:
        current = job_rows.get_job(connection, job_key).fence
        if current != fence:
            raise StaleAttemptError(f"runner {fence} was replaced by runner {current}: its results are refused")

    # --- writes over HTTP --------------------------------------------------------------------------------------------

    def write_items(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> Written:
        """Keeps items from any generator anywhere, all or none. The same uid twice is one item.

        Raises:
            NotFoundError: no such job, or none is open.
            ConflictError: ``job_id`` is missing while several jobs are open; an instance that the input does not have;
                the job takes no writes (its own runner plays it, or it is over).
        """
        (keeping,) = self._keep_bytes([Write(job_id, items)])
        return self.store.commit(lambda connection: self._write_items(connection, job_id, keeping))

    def write_together(self, writes: Sequence[Write]) -> list[Written | Exception]:
        """Does ``write_items`` for each, with one fsync for all; what one of them raises stands in its place."""
        try:
            keeping = self._keep_bytes(writes)
        except Exception:  # noqa: BLE001 - of one of them, or of the disk: each finds out for itself
            return [self._write_alone(write) for write in writes]
        works = [
            partial(self._write_items, job_id=write.job_id, items=items)
            for write, items in zip(writes, keeping, strict=True)
        ]
        return self.store.commit_each(works)

    def _write_alone(self, write: Write) -> Written | Exception:
        try:
            return self.write_items(write.job_id, write.items)
        except Exception as error:  # noqa: BLE001 - it is the answer to this one write
            return error

    def _keep_bytes(self, writes: Sequence[Write]) -> list[list[tuple[wire.WrittenItem, Kept | None]]]:
        """Makes the bytes of all items durable; returns each write's items with what their rows are to say of them."""
        by_write = [self._drafts(write) for write in writes]
        kept = iter(self.contents.keep([draft for drafts in by_write for draft in drafts.values()]))
        found = [{uid: next(kept) for uid in drafts} for drafts in by_write]
        return [
            [(item, kept_of_write.get(item.uid)) for item in write.items]
            for write, kept_of_write in zip(writes, found, strict=True)
        ]

    def _drafts(self, write: Write) -> dict[str, Draft]:
        drafts = {item.uid: _draft(item) for item in reversed(write.items)}  # of one uid twice, the first counts
        if any(draft.takes_place for draft in drafts.values()):
            for uid in self._written_already(write.job_id, write.items):
                del drafts[uid]
        return drafts

    def _written_already(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> set[str]:
        """Which items need no bytes kept any more; asked before, since what is written twice takes place twice."""
        if job_id is not None and len(items) == 1:
            known = trajectory_rows.has_trajectory_of_job(self.store.look(), job_id, items[0].uid)
            if known is not None:
                return {items[0].uid} if known else set()
        with self.store.read() as connection:
            job = self._job_for_write(connection, job_id)
            return {item.uid for item in items if trajectory_rows.has_trajectory(connection, job.key, item.uid)}

    def _write_items(
        self, connection: Connection, job_id: str | None, items: Sequence[tuple[wire.WrittenItem, Kept | None]]
    ) -> tuple[JobRecord, list[WriteResult]]:
        job = self._job_for_write(connection, job_id)
        return job, [self._write_item(connection, job, item, kept) for item, kept in items]

    def _job_for_write(self, connection: Connection, job_id: str | None) -> JobRecord:
        if job_id is not None:
            return self._find(connection, job_id)
        candidates = job_rows.jobs_in_states(connection, job_rules.OPEN_STATES)
        if not candidates:
            raise NotFoundError("no job is open: start one with /start_rollout (task_type external) and write then")
        if len(candidates) > 1:
            raise _several(candidates)
        return candidates[0]

    def _write_item(
        self, connection: Connection, job: JobRecord, item: wire.WrittenItem, kept: Kept | None
    ) -> WriteResult:
        if trajectory_rows.has_trajectory(connection, job.key, item.uid):
            return WriteResult(uid=item.uid, status="duplicate")
        if kept is None:
            raise UnavailableError(f"item {item.uid!r} was stored and is being removed: write it again")
        group, members = self._group_for(connection, job, item.instance_id)
        now = self._clock()
        kept.record(connection, now)
        trajectory_rows.insert_trajectory(
            connection,
            job_key=job.key,
            uid=item.uid,
            group_key=None if group is None else group.key,
            slot=members,
            attempt=1,
            instance_id=item.instance_id,
            outcome=item.outcome.value,
            stop_reason=item.stop_reason.value,
            reward=item.reward,
            raw_reward=item.raw_reward,
            **self._note_versions(connection, job.key, item.generations),
            **facts_of(item.body["extra_info"], item.body["timings_s"], item.generations).columns(),
            late=group is None,
            created_at=now,
            **kept.columns(),
        )
        if group is None:
            return WriteResult(uid=item.uid, status="late")
        group_rows.update_group(connection, group.key, last_write_at=now, opened_at=group.opened_at or now)
        if not job.has_runner and members + 1 >= job.group_size:
            self._close_complete(connection, job, group)
        return WriteResult(uid=item.uid, status="stored")

    def _group_for(self, connection: Connection, job: JobRecord, instance_id: str) -> tuple[GroupRecord | None, int]:
        """The earliest open group of the instance with a free slot, and its members so far; no group: it is late."""
        existing = group_rows.groups_of_instance(connection, job.key, instance_id)
        if not existing:
            if job.has_input or job.state not in job_rules.OPEN_STATES:
                raise ConflictError(
                    f"job {job.job_id} has no instance {instance_id!r} (its state is {job.state.value})"
                )
            group_rows.insert_group_of_new_instance(connection, job.key, instance_id)
            existing = group_rows.groups_of_instance(connection, job.key, instance_id)
        for group in existing:
            if group.state is GroupState.OPEN:
                members = trajectory_rows.count_members(connection, group.key)
                if members < job.group_size:
                    return group, members
        return None, 0

    def _close_complete(self, connection: Connection, job: JobRecord, group: GroupRecord) -> None:
        members = trajectory_rows.members_of(connection, group.key)
        self._close_group(connection, group.key, group_rules.judge_group(members, group_policy(job)))

    # --- delivery ----------------------------------------------------------------------------------------------------

    def resolve_job(self, job_id: str | None) -> JobRecord | None:
        """Returns the job a poll means: the one it names, else the only one with something to come; None for none.

        Raises:
            NotFoundError: there is no job of that id.
            ConflictError: no id was given and several jobs are open.
        """
        with self.store.read() as connection:
            if job_id is not None:
                return self._find(connection, job_id)
            candidates = job_rows.jobs_with_groups_for_a_trainer(connection)
        if len(candidates) > 1:
            raise _several(candidates)
        return candidates[0] if candidates else None

    def take(self, job: JobRecord, poll: PollPayload) -> Delivery | None:
        """Hands out ready groups, whole and oldest first; None when there is nothing to hand out.

        With ``lease_s`` they are leased until they are acknowledged; without, they count as delivered at once. The same
        (consumer_id, poll_id) gets the same delivery again, and a delivery whose lease ran out comes back as it was.

        Raises:
            ConflictError: ``batch_size`` asks for less than one group.
        """
        with self.store.write() as connection:
            return deliveries.take(connection, self._clock(), job, poll)

    def has_news(self, job: JobRecord, poll: PollPayload) -> bool:
        """Tells cheaply whether ``take`` would find something."""
        with self.store.read() as connection:
            if delivery_rows.ready_groups(connection, job.key, 1):
                return True
            if poll.consumer_id is not None and poll.poll_id is not None:
                repeated = delivery_rows.delivery_of_poll(connection, job.key, poll.consumer_id, poll.poll_id)
                return repeated is not None
            return False

    def is_over(self, job: JobRecord) -> bool:
        """Tells whether waiting is pointless: the job is over, and nothing of it is ready or leased."""
        with self.store.read() as connection:
            final = job_rows.get_job(connection, job.key).state in job_rules.FINAL_STATES
            return final and not delivery_rows.has_groups(connection, job.key, GroupState.READY, GroupState.LEASED)

    def empty_meta_info(self, job: JobRecord | None) -> dict[str, Any]:
        """Returns what a poll is told that gets nothing."""
        statistics = group_rules.summarize_rewards(
            samples=0, groups=0, total=0.0, square_total=0.0, low=None, high=None
        )
        about: dict[str, Any] = {"finished_groups": [], "delivery_id": None, "exhausted": False, "outcomes": {}}
        if job is None:
            return {**statistics, **about}
        with self.store.read() as connection:
            exhausted = deliveries.is_exhausted(connection, job.key)
            state = job_rows.get_job(connection, job.key).state.value
        return {**statistics, **about, "exhausted": exhausted, "job_id": job.job_id, "job_state": state}

    def polled(self, job: JobRecord) -> None:
        """Notes that a trainer asked for a job's data; a job that had paused itself goes on."""
        with self.store.write() as connection:
            job_rows.update_job(connection, job.key, last_poll_at=self._clock())
            current = job_rows.get_job(connection, job.key)
            if current.state is JobState.PAUSED and current.cause == IDLE:
                job_rows.update_job(connection, job.key, state=JobState.RUNNING.value, cause="")

    def polled_in_vain(self, job: JobRecord) -> None:
        """Notes since when a trainer has polled and got nothing; who comes back after long begins to wait anew."""
        gone = self._clock() - (job.last_poll_at or 0.0) > LONGEST_GAP_BETWEEN_POLLS_S
        if job.waiting_since is None or gone:
            with self.store.write() as connection:
                job_rows.update_job(connection, job.key, waiting_since=self._clock())

    def pause_idle_jobs(self) -> list[str]:
        """Pauses jobs whose groups nobody has asked for in ``pause_when_idle_s``: their devices are free for others."""
        paused = []
        for job in self.unfinished_jobs():
            patience = job.settings["pause_when_idle_s"]
            asked_at = job.last_poll_at or job.created_at
            if not job.has_runner or job.state is not JobState.RUNNING or patience is None:
                continue
            if self._clock() - asked_at > patience and self.groups_ahead(job.key):
                with self.store.write() as connection:
                    job_rows.update_job(connection, job.key, state=JobState.PAUSED.value, cause=IDLE)
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

    def acknowledge(self, delivery_ids: Sequence[str]) -> dict[str, list[str]]:
        """Counts deliveries as received; doing it twice changes nothing.

        Returns the ids by what they were: ``acked`` (now or earlier), ``expired`` (their groups went to somebody else
        in the meantime) and ``unknown``.
        """
        result: dict[str, list[str]] = {"acked": [], "expired": [], "unknown": []}
        with self.store.write() as connection:
            deliveries.expire_leases(connection, self._clock())
            for delivery_id in delivery_ids:
                result[deliveries.acknowledge(connection, delivery_id)].append(delivery_id)
        return result

    def expire_leases(self) -> None:
        """Makes what was not acknowledged in time ready again.

        A lease that ends later than it can was given before the clock was set back: it begins anew.
        """
        with self.store.write() as connection:
            delivery_rows.shorten_leases(connection, self._clock())
            deliveries.expire_leases(connection, self._clock())

    # --- the clock ---------------------------------------------------------------------------------------------------

    def close_timed_out_groups(self) -> int:
        """Closes the groups of external jobs whose last item is older than the job's timeout; returns how many."""
        closed = 0
        for job in self.unfinished_jobs():
            if job.has_runner or job.state is not JobState.RUNNING:
                continue
            deadline = self._clock() - float(job.settings["group_timeout_seconds"])
            for group, _ in self.begun_open_groups(job.key):
                if group.last_write_at is not None and group.last_write_at < deadline:
                    members = self.members(group, with_items=False)
                    verdict = group_rules.judge_group(members, group_policy(job), timed_out=True)
                    closed += self.close_group(group, verdict, judged=len(members))
        return closed

    def restart_group_clocks(self) -> None:
        """Lets external groups wait anew: nobody could write while no server ran."""
        with self.store.write() as connection:
            for job in job_rows.jobs_in_states(connection, job_rules.OPEN_STATES):
                if not job.has_runner:
                    group_rows.restart_group_clocks(connection, job.key, self._clock())

    def beat(self, name: str, pid: int, detail: Mapping[str, Any]) -> None:
        """Says that a process lives, and what it knows."""
        with self.store.write() as connection:
            service_rows.beat(connection, name, pid, self._clock(), dict(detail))

    def forget(self, name: str) -> None:
        """Says that a process ended in order."""
        with self.store.write() as connection:
            service_rows.forget(connection, name)

    def heartbeat(self, name: str) -> tuple[float, dict[str, Any]] | None:
        """Returns how many seconds ago a process last said that it lives, and what it said.

        A beat from the future is as old as it is far away: whoever lives beats again after the clock was set back.
        """
        with self.store.read() as connection:
            found = service_rows.heartbeat(connection, name)
        return None if found is None else (abs(self._clock() - found[0]), found[1])

    # --- looking -----------------------------------------------------------------------------------------------------

    def describe(self, job: JobRecord) -> dict[str, Any]:
        """Returns a job's state, progress and books. All counts are of slots and come from one snapshot."""
        with self.store.read() as connection:
            job = job_rows.get_job(connection, job.key)
            counted = group_rows.count_groups(connection, job.key)
            attempts = attempt_rows.count_attempts(connection, job.key)
            outcomes = trajectory_rows.count_outcomes(connection, job.key)
            causes = group_rows.count_causes(connection, job.key)
            late = trajectory_rows.count_late(connection, job.key)
            damaged = content_rows.count_damaged(connection, job.key)
            measures = job_measures(connection, job.key)
        slots = {state.value: count * job.group_size for state, count in counted.items()}
        return {
            "job_id": job.job_id,
            "task_type": job.task_type,
            "state": job.state.value,
            "cause": job.cause,
            "engine_url": job.engine_url,
            "group_size": job.group_size,
            "instances": job.instance_count,
            "epochs": job.num_epoch,
            "created_at": job.created_at,
            "updated_at": job.updated_at,
            "finished_at": job.finished_at,
            "last_poll_at": job.last_poll_at,
            "groups": {state.value: count for state, count in counted.items()},
            "slots": {"submitted": sum(slots.values()), **slots},
            "attempts": attempts,
            "outcomes": outcomes,
            "late": late,
            "damaged": damaged,
            "measures": measures,
            "causes": causes,
            "settings": job.settings,
        }


def _draft(item: wire.WrittenItem) -> Draft:
    try:
        body = orjson.dumps(item.body, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidPayloadError(f"item {item.uid!r} is nested too deeply, or cannot be kept: {error}") from error
    return Draft(body, wire.image_hashes(body), item.images, f"item {item.uid!r}")


def group_policy(job: JobRecord, reward_range: tuple[float, float] | None = None) -> GroupPolicy:
    """Builds what a job's groups are measured by; the payload's reward range comes before the generator's."""
    settings = job.settings
    wanted = settings.get("reward_range")
    return GroupPolicy(
        group_size=job.group_size,
        task_type=job.task_type,
        reward_range=(wanted[0], wanted[1]) if wanted else reward_range or DEFAULT_REWARD_RANGE,
        evaluation=settings["evaluation"],
        min_valid_group_size_ratio=settings["min_valid_group_size_ratio"],
        min_valid_item_size_ratio=settings["min_valid_item_size_ratio"],
        min_timeout_group_size_ratio=settings["min_timeout_group_size_ratio"],
        normalize_rewards=settings["normalize_rewards"],
        padding=settings["padding"],
    )


def _several(candidates: Sequence[JobRecord]) -> ConflictError:
    names = [job.job_id for job in candidates]
    return ConflictError(
        f"{len(names)} jobs are open: say which with job_id ({', '.join(names[:10])})", {"jobs": names}
    )
