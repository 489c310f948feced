"""Items that come over HTTP, from any generator anywhere: their bytes made durable, then their rows written.

Nothing here asks which generator that was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import (
    ConflictError,
    InvalidPayloadError,
    NotFoundError,
    RewardRangeError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.rules import jobs as job_rules
from slime_plugins.rollout_buffer.rules.vocabulary import vocabulary_size
from slime_plugins.rollout_buffer.state.group_closing import judge_and_close
from slime_plugins.rollout_buffer.state.group_opening import is_planned, open_next_of_instance
from slime_plugins.rollout_buffer.state.job_lookup import find_job, group_policy, several_jobs
from slime_plugins.rollout_buffer.state.trajectory_insert import SlotOfTrajectory, insert_trajectory
from slime_plugins.rollout_buffer.storage.payload_store import PayloadStore, PendingPayload, StoredPayload
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, job_rows, trajectory_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState, WriteStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What became of an item."""

    uid: str
    status: WriteStatus


@dataclass(frozen=True, slots=True)
class Write:
    """What one request brings: items for the job it names, or for the only open one."""

    job_id: str | None
    items: Sequence[wire.WrittenItem]


@dataclass(frozen=True, slots=True)
class Refusal:
    """How many items were refused of a request that named a job, or none, and with which answer."""

    job_id: str | None
    items: int
    status: int
    code: str
    message: str

    def sentence(self) -> str:
        """Says it with the status, as the writer was told."""
        return f"{self.status} {self.code}: {self.message}"[:500]


ITEMS_IN_A_TURN = 100
MAX_TURN_S = 0.1
"""A write of more items, or one that takes longer, gives others their turn in between."""

Written = tuple[JobRecord, list[WriteResult]]
_Jobs = dict[str | None, JobRecord]


class ItemWriter:
    """Keeps what requests bring, alone or several together. Safe to use from many threads."""

    def __init__(self, store: Store, contents: PayloadStore, *, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds since the epoch."""
        self._store = store
        self._contents = contents
        self._clock = clock

    def write(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> Written:
        """Keeps items from any generator anywhere, all or none. The same uid twice is one item.

        More than ``ITEMS_IN_A_TURN`` are checked as a whole and kept in parts: what stops in the middle, as a full disk
        does, has kept the first ones, and the same write again keeps the others.

        Raises:
            InvalidPayloadError: token ids that the job's model does not have, or more of them than its cap allows.
            NotFoundError: no such job, or none is open.
            ConflictError: ``job_id`` is missing while several jobs are open; an instance that the input does not have;
                the job takes no writes (its own runner plays it, or it is over).
            RewardRangeError: a reward lies outside of the job's ``reward_range``.
        """
        if len(items) > ITEMS_IN_A_TURN:
            return self._write_in_parts(job_id, items)
        (stored,) = self._store_bytes([Write(job_id, items)])
        return self._store.commit(lambda connection: self._write_items(connection, job_id, stored, {}))

    def _write_in_parts(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> Written:
        with self._store.read() as connection:
            job = self._job_for_write(connection, job_id)
            _check(connection, job, items)
            for instance_id in {item.instance_id for item in items}:
                _groups_of_known_instance(connection, job, instance_id)
        results: list[WriteResult] = []
        for at in range(0, len(items), ITEMS_IN_A_TURN):
            (stored,) = self._store_bytes([Write(job.job_id, items[at : at + ITEMS_IN_A_TURN])])
            while stored:
                of_turn = self._store.commit(partial(self._write_some, job=job, items=stored))
                results += of_turn
                stored = stored[len(of_turn) :]
        return job, results

    def _write_some(
        self, connection: Connection, job: JobRecord, items: Sequence[tuple[wire.WrittenItem, StoredPayload | None]]
    ) -> list[WriteResult]:
        """Writes one item after the other until it has taken ``MAX_TURN_S``."""
        until = time.monotonic() + MAX_TURN_S
        current = job_rows.get_job(connection, job.key)
        results: list[WriteResult] = []
        for item, payload in items:
            results.append(self._write_item(connection, current, item, payload))
            if time.monotonic() > until:
                break
        return results

    def write_together(self, writes: Sequence[Write]) -> list[Written | Exception]:
        """Does ``write`` for each, with one fsync for all; what one of them raises stands in its place."""
        return [outcome for batch in _turns(writes) for outcome in self._write_in_a_turn(batch)]

    def _write_in_a_turn(self, writes: Sequence[Write]) -> list[Written | Exception]:
        if len(writes) == 1:
            return [self._write_alone(writes[0])]
        try:
            stored = self._store_bytes(writes)
        except Exception:  # noqa: BLE001 - of one of them, or of the disk: each finds out for itself
            return [self._write_alone(write) for write in writes]
        jobs: _Jobs = {}
        works = [
            partial(self._write_items, job_id=write.job_id, items=items, jobs=jobs)
            for write, items in zip(writes, stored, strict=True)
        ]
        return self._store.commit_each(works)

    def _write_alone(self, write: Write) -> Written | Exception:
        try:
            return self.write(write.job_id, write.items)
        except Exception as error:  # noqa: BLE001 - it is the answer to this one write
            return error

    def _store_bytes(self, writes: Sequence[Write]) -> list[list[tuple[wire.WrittenItem, StoredPayload | None]]]:
        """Makes the bytes of all items durable; returns each write's items with what their rows are to say of them."""
        by_write = [self._pending_payloads(write) for write in writes]
        payloads = iter(self._contents.store([one for pending in by_write for one in pending.values()]))
        found = [{uid: next(payloads) for uid in pending} for pending in by_write]
        return [
            [(item, of_write.get(item.uid)) for item in write.items]
            for write, of_write in zip(writes, found, strict=True)
        ]

    def _pending_payloads(self, write: Write) -> dict[str, PendingPayload]:
        # Of one uid twice, the first counts.
        pending = {item.uid: _pending_payload(item) for item in reversed(write.items)}
        if any(one.takes_place for one in pending.values()):
            for uid in self._written_already(write.job_id, write.items):
                del pending[uid]
        return pending

    def _written_already(self, job_id: str | None, items: Sequence[wire.WrittenItem]) -> set[str]:
        """Which items need no bytes kept any more; asked before, since what is written twice takes place twice."""
        if job_id is not None and len(items) == 1:
            with self._store.look() as connection:
                known = trajectory_rows.has_trajectory_of_job(connection, job_id, items[0].uid)
            if known is not None:
                return {items[0].uid} if known else set()
        with self._store.read() as connection:
            job = self._job_for_write(connection, job_id)
            return {item.uid for item in items if trajectory_rows.has_trajectory(connection, job.key, item.uid)}

    def _write_items(
        self,
        connection: Connection,
        job_id: str | None,
        items: Sequence[tuple[wire.WrittenItem, StoredPayload | None]],
        jobs: _Jobs,
    ) -> Written:
        """``jobs`` were looked up already in this transaction; no write changes what is asked of them."""
        if job_id not in jobs:
            jobs[job_id] = self._job_for_write(connection, job_id)
        job = jobs[job_id]
        _check(connection, job, [item for item, _ in items])
        return job, [self._write_item(connection, job, item, payload) for item, payload in items]

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Counts items that were refused for the jobs that they were meant for; of the last one they say why."""
        with self._store.read() as connection:
            noted = [(job.key, refusal) for refusal in refusals for job in _meant(connection, refusal.job_id)]
        if noted:
            with self._store.write() as connection:
                for job_key, refusal in noted:
                    job_rows.note_refused_items(connection, job_key, refusal.items, refusal.sentence())

    def _job_for_write(self, connection: Connection, job_id: str | None) -> JobRecord:
        if job_id is not None:
            return find_job(connection, job_id)
        candidates = job_rows.jobs_in_states(connection, job_rules.OPEN_STATES)
        if not candidates:
            raise NotFoundError("no job is open: start one with /start_rollout (task_type external) and write then")
        if len(candidates) > 1:
            raise several_jobs(candidates)
        return candidates[0]

    def _write_item(
        self, connection: Connection, job: JobRecord, item: wire.WrittenItem, payload: StoredPayload | None
    ) -> WriteResult:
        if trajectory_rows.has_trajectory(connection, job.key, item.uid):
            return WriteResult(uid=item.uid, status=WriteStatus.DUPLICATE)
        if payload is None:
            raise UnavailableError(f"item {item.uid!r} was stored and is being removed: write it again")
        group, members = self._group_for(connection, job, item.instance_id)
        now = self._clock()
        slot = SlotOfTrajectory(
            job_key=job.key,
            group_key=None if group is None else group.key,
            instance_id=item.instance_id,
            slot=members,
            attempt=1,
            late=group is None,
        )
        insert_trajectory(connection, now, slot, item, payload)
        if group is None:
            return WriteResult(uid=item.uid, status=WriteStatus.LATE)
        group_rows.update_group(connection, group.key, last_write_at=now, opened_at=group.opened_at or now)
        if not job.has_runner and members + 1 >= job.group_size:
            judge_and_close(connection, now, group.key, group_policy(job))
        return WriteResult(uid=item.uid, status=WriteStatus.STORED)

    def _group_for(self, connection: Connection, job: JobRecord, instance_id: str) -> tuple[GroupRecord | None, int]:
        """The earliest open group of the instance with a free slot, and its members so far; no group: it is late."""
        existing = _groups_of_known_instance(connection, job, instance_id)
        for group in existing:
            if group.state is GroupState.OPEN:
                members = trajectory_rows.count_members(connection, group.key)
                if members < job.group_size:
                    return group, members
        if not existing and not job.has_input:
            group_rows.insert_group_of_new_instance(connection, job.key, instance_id)
            return group_rows.groups_of_instance(connection, job.key, instance_id)[0], 0
        return open_next_of_instance(connection, job.key, instance_id), 0


def _meant(connection: Connection, job_id: str | None) -> list[JobRecord]:
    """Returns the job of that name; without one the only open job, or else those whose generator writes its items."""
    if job_id is not None:
        named = job_rows.find_job(connection, job_id)
        return [named] if named is not None and named.takes_items else []
    candidates = [job for job in job_rows.jobs_in_states(connection, job_rules.OPEN_STATES) if job.takes_items]
    return candidates if len(candidates) == 1 else [job for job in candidates if job.has_runner]


def _turns(writes: Sequence[Write]) -> Iterator[list[Write]]:
    """Yields the writes in order, as many together as one turn may take."""
    batch: list[Write] = []
    items = 0
    for write in writes:
        items += len(write.items)
        if batch and items > ITEMS_IN_A_TURN:
            yield batch
            batch, items = [], len(write.items)
        batch.append(write)
    if batch:
        yield batch


def _groups_of_known_instance(connection: Connection, job: JobRecord, instance_id: str) -> list[GroupRecord]:
    """Returns an instance's groups that have rows; none of one that is to come, or that a write may bring."""
    existing = group_rows.groups_of_instance(connection, job.key, instance_id)
    may_bring = not job.has_input and job.state in job_rules.OPEN_STATES
    if not existing and not may_bring and not is_planned(connection, job.key, instance_id):
        raise ConflictError(f"job {job.job_id} has no instance {instance_id!r} (its state is {job.state.value})")
    return existing


def _check(connection: Connection, job: JobRecord, items: Sequence[wire.WrittenItem]) -> None:
    """Raises for what a job does not take; what it has already passes whatever its reward is."""
    if not job.takes_items:
        raise ConflictError(
            f"job {job.job_id} is played by its own runner, which fills every slot itself: start a job of "
            "task_type external for items from outside"
        )
    for item in items:
        _check_tokens(job, item)
    if job.settings.reward_range is None:
        return
    low, high = job.settings.reward_range
    for item in items:
        if not low <= item.reward <= high and not trajectory_rows.has_trajectory(connection, job.key, item.uid):
            raise RewardRangeError(
                f"item {item.uid!r} has the reward {item.reward:g}, outside of the reward_range of job {job.job_id}, "
                f"{low:g} to {high:g}: nothing of this request was stored",
                {"uid": item.uid, "reward": item.reward, "reward_range": [low, high]},
            )


def _check_tokens(job: JobRecord, item: wire.WrittenItem) -> None:
    """Holds what was sampled to the job's own tokenizer and cap, as far as it names them."""
    if not item.generations:
        return
    size = vocabulary_size(job.settings.tokenizer_path)
    if size is not None and item.largest_id >= size:
        raise InvalidPayloadError(
            f"item {item.uid!r} holds the token id {item.largest_id}, and the model of job {job.job_id} has {size}"
        )
    cap = job.settings.generation_cap
    longest = max(len(generation.output_ids) for generation in item.generations)
    if cap is not None and longest > cap:
        raise InvalidPayloadError(
            f"item {item.uid!r} holds a generation of {longest} tokens, and the cap of job {job.job_id} is {cap}"
        )


def _pending_payload(item: wire.WrittenItem) -> PendingPayload:
    try:
        body = orjson.dumps(item.body, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidPayloadError(f"item {item.uid!r} is nested too deeply, or cannot be kept: {error}") from error
    needs = [*wire.image_hashes(body), *wire.record_hashes(item.generations)]
    came = {sha256: image.data for sha256, image in item.images.items()}
    return PendingPayload(body, needs, came, f"item {item.uid!r}", item.uid)
