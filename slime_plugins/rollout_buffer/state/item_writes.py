"""Stores items written over HTTP: payloads first, then their rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
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
from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.state.group_closing import close_full_groups
from slime_plugins.rollout_buffer.state.group_opening import is_planned, open_next_of_instance
from slime_plugins.rollout_buffer.state.job_lookup import find_job, several_jobs
from slime_plugins.rollout_buffer.state.trajectory_insert import SlotOfTrajectory, insert_trajectory
from slime_plugins.rollout_buffer.storage.payload_store import PayloadStore, PendingPayload, StoredPayload
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, job_rows, trajectory_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.tokenizer_loading import vocabulary_size
from slime_plugins.rollout_buffer.types import GroupState, WriteStatus
from slime_plugins.rollout_buffer.wire.delivery_replies import WriteResult
from slime_plugins.rollout_buffer.wire.written_items import WrittenItem


@dataclass(frozen=True, slots=True)
class Write:
    """The items of one request, for the job ``job_id``, or for the only open job if it is None."""

    job_id: str | None
    items: Sequence[WrittenItem]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The number of refused items of a request, the job that it named, and the reply."""

    job_id: str | None
    item_count: int
    status: int
    code: str
    message: str

    def sentence(self) -> str:
        """Returns status, code and message of the reply."""
        return f"{self.status} {self.code}: {self.message}"[:500]


Written = tuple[JobRecord, list[WriteResult]]
"""The job of a write, and the result of each of its items."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """A valid write, with the payloads of its new items by uid."""

    job_key: int
    items: Sequence[WrittenItem]
    payloads: Mapping[str, PendingPayload]


class ItemWriter:
    """Stores written items. Safe to use from many threads."""

    def __init__(self, store: Store, payloads: PayloadStore, *, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds since the epoch."""
        self._store = store
        self._payloads = payloads
        self._clock = clock

    def write(self, writes: Sequence[Write]) -> list[Written | Exception]:
        """Stores the items of several requests: all payloads with one fsync, then all rows in one transaction.

        Each write is stored completely or not at all. Items with the same uid are stored once. The result of an invalid
        write is its error; the other writes are stored. Such errors are:

        * ``InvalidPayloadError``: token ids outside of the model's vocabulary, a generation longer than the job's cap,
          or an image or token records that are not stored;
        * ``NotFoundError``: there is no job of that id, or no job is open;
        * ``ConflictError``: several jobs are open, and the write names none of them; the job has no such instance, or
          its runner fills every slot;
        * ``RewardRangeError``: a reward outside of the job's ``reward_range``.

        Raises:
            StorageFullError, UnavailableError: the disk is full or does not work. No write is stored.
        """
        with self._store.read() as connection:
            jobs: dict[str | None, JobRecord] = {}
            checked = [self._check(connection, write, jobs) for write in writes]
        valid = [write for write in checked if isinstance(write, _Checked)]
        stored = iter(self._payloads.store([payload for write in valid for payload in write.payloads.values()]))
        current: dict[int, JobRecord] = {}
        works = [
            partial(self._write_rows, write=write, payloads={uid: next(stored) for uid in write.payloads}, jobs=current)
            for write in valid
        ]
        outcomes = iter(self._store.commit_each(works))
        return [next(outcomes) if isinstance(write, _Checked) else write for write in checked]

    def _check(self, connection: Connection, write: Write, jobs: dict[str | None, JobRecord]) -> _Checked | Exception:
        """Returns a valid write or its error. ``jobs`` caches jobs between writes."""
        try:
            if write.job_id not in jobs:
                jobs[write.job_id] = self._job_for_write(connection, write.job_id)
            job = jobs[write.job_id]
            if not job.takes_items:
                raise ConflictError(
                    f"job {job.job_id} is played by its runner, which fills every slot: start a job of task_type "
                    "external to write items"
                )
            payloads: dict[str, PendingPayload] = {}
            for item in write.items:
                if item.uid in payloads or trajectory_rows.has_trajectory(connection, job.key, item.uid):
                    continue
                _check_tokens(job, item)
                check_reward(job, item.uid, item.reward)
                payloads[item.uid] = _pending_payload(item)
                self._payloads.check_named(connection, payloads[item.uid])
        except sqlite3.Error:
            raise  # no write can be stored
        except Exception as error:  # noqa: BLE001 - it is the result of this write
            return error
        return _Checked(job.key, write.items, payloads)

    def _write_rows(
        self, connection: Connection, write: _Checked, payloads: Mapping[str, StoredPayload], jobs: dict[int, JobRecord]
    ) -> Written:
        """Adds the rows of a write. ``jobs`` caches jobs: no write of the transaction changes the columns used here."""
        if write.job_key not in jobs:
            jobs[write.job_key] = job_rows.get_job(connection, write.job_key)
        job = jobs[write.job_key]
        return job, [self._write_row(connection, job, item, payloads.get(item.uid)) for item in write.items]

    def _write_row(
        self, connection: Connection, job: JobRecord, item: WrittenItem, payload: StoredPayload | None
    ) -> WriteResult:
        if trajectory_rows.has_trajectory(connection, job.key, item.uid):
            return WriteResult(uid=item.uid, status=WriteStatus.DUPLICATE)
        if payload is None:
            raise UnavailableError(f"item {item.uid!r} was stored and is being removed: write it again")
        group, member_count = _group_for(connection, job, item.instance_id)
        now = self._clock()
        slot = SlotOfTrajectory(
            job_key=job.key,
            group_key=None if group is None else group.key,
            instance_id=item.instance_id,
            slot=member_count,
            attempt=1,
            late=group is None,
        )
        insert_trajectory(connection, now, slot, item, payload)
        if group is None:
            return WriteResult(uid=item.uid, status=WriteStatus.LATE)
        group_rows.update_group(connection, group.key, last_write_at=now, opened_at=group.opened_at or now)
        close_full_groups(connection, now, job, only=group.key)
        return WriteResult(uid=item.uid, status=WriteStatus.STORED)

    def note_refusals(self, refusals: Sequence[Refusal]) -> None:
        """Counts refused items in their jobs, with the message of the last refusal."""
        with self._store.read() as connection:
            noted = [(job.key, refusal) for refusal in refusals for job in _refusing_jobs(connection, refusal.job_id)]
        if noted:
            with self._store.write() as connection:
                for job_key, refusal in noted:
                    job_rows.note_refused_items(connection, job_key, refusal.item_count, refusal.sentence())

    def _job_for_write(self, connection: Connection, job_id: str | None) -> JobRecord:
        if job_id is not None:
            return find_job(connection, job_id)
        candidates = job_rows.jobs_in_states(connection, job_states.OPEN_STATES)
        if not candidates:
            raise NotFoundError("no job is open: start a job with /start_rollout (task_type external) first")
        if len(candidates) > 1:
            raise several_jobs(candidates, "are open")
        return candidates[0]


def _refusing_jobs(connection: Connection, job_id: str | None) -> list[JobRecord]:
    """Returns the jobs in which a refusal is counted: the job of that id, if it takes items.

    Without an id it is the only open job that takes items; of several such jobs, those with a runner, whose generators
    write items without an id.
    """
    if job_id is not None:
        named = job_rows.find_job(connection, job_id)
        return [named] if named is not None and named.takes_items else []
    candidates = [job for job in job_rows.jobs_in_states(connection, job_states.OPEN_STATES) if job.takes_items]
    return candidates if len(candidates) == 1 else [job for job in candidates if job.has_runner]


def groups_of_known_instance(connection: Connection, job: JobRecord, instance_id: str) -> list[GroupRecord]:
    """Returns the groups of an instance: none if only the input names the instance, or if an item may be the first to
    name it.

    Raises:
        ConflictError: the job has no such instance.
    """
    existing = group_rows.groups_of_instance(connection, job.key, instance_id)
    takes_new_instances = not job.has_input and job.state in job_states.OPEN_STATES
    if not existing and not takes_new_instances and not is_planned(connection, job.key, instance_id):
        raise ConflictError(f"job {job.job_id} has no instance {instance_id!r} (its state is {job.state.value})")
    return existing


def _group_for(connection: Connection, job: JobRecord, instance_id: str) -> tuple[GroupRecord | None, int]:
    """Returns the group of a new item, and the number of members that the group has; None if the item is late.

    It is the instance's earliest open group with a free slot, or else its next group, which is opened.
    """
    existing = groups_of_known_instance(connection, job, instance_id)
    for group in existing:
        if group.state is GroupState.OPEN:
            member_count = trajectory_rows.count_members(connection, group.key)
            if member_count < job.group_size:
                return group, member_count
    if not existing and not job.has_input:
        group_rows.insert_group_of_new_instance(connection, job.key, instance_id)
        return group_rows.groups_of_instance(connection, job.key, instance_id)[0], 0
    return open_next_of_instance(connection, job.key, instance_id), 0


def check_reward(job: JobRecord, uid: str, reward: float) -> None:
    """Raises ``RewardRangeError`` for a reward outside of the job's ``reward_range``."""
    if job.settings.reward_range is None:
        return
    low, high = job.settings.reward_range
    if not low <= reward <= high:
        raise RewardRangeError(
            f"item {uid!r} has the reward {reward:g}, outside of the reward_range of job {job.job_id}, "
            f"{low:g} to {high:g}: nothing of this request was stored",
            {"uid": uid, "reward": reward, "reward_range": [low, high]},
        )


def _check_tokens(job: JobRecord, item: WrittenItem) -> None:
    """Checks tokens against the vocabulary and the generation cap of the job, where these are known."""
    if not item.generations:
        return
    size = vocabulary_size(job.settings.tokenizer_path)
    if size is not None and item.largest_id >= size:
        raise InvalidPayloadError(
            f"item {item.uid!r} holds the token id {item.largest_id}, and the model of job {job.job_id} has {size} ids"
        )
    cap = job.settings.generation_cap
    longest = max(len(generation.output_ids) for generation in item.generations)
    if cap is not None and longest > cap:
        raise InvalidPayloadError(
            f"item {item.uid!r} holds a generation of {longest} tokens, and the cap of job {job.job_id} is {cap}"
        )


def _pending_payload(item: WrittenItem) -> PendingPayload:
    try:
        body = orjson.dumps(item.body, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidPayloadError(f"item {item.uid!r} is nested too deeply, or is not valid JSON: {error}") from error
    hashes = [*wire.image_hashes(body), *wire.record_hashes(item.generations)]
    data = {sha256: image.data for sha256, image in item.images.items()}
    return PendingPayload(body, hashes, data, f"item {item.uid!r}", item.uid)
