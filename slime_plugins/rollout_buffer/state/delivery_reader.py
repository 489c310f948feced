"""Yields the members of a delivery with their payloads; reads the next members while one is sent.

Reader threads read and check payloads, and read the bytes of screenshots. The sending thread does the rest: shared
between threads, that work takes three times as long, because they contend for Python's GIL.

Only a few batches of members are in memory at a time. A member whose payload is missing or damaged is delivered as a
dummy with the error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeVar

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.payload_store import Inlining, PayloadStore, Pieces
from slime_plugins.rollout_buffer.storage.store import Store, checked_body
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, payload_rows
from slime_plugins.rollout_buffer.storage.tables.delivery_rows import DeliveredMember
from slime_plugins.rollout_buffer.types import Outcome
from slime_plugins.rollout_buffer.wire.delivery_replies import ShortGroup

READERS = 2
"""Reader threads of a process, for all its deliveries."""
BATCHES_AHEAD = 1
"""Number of batches of payloads that are read while the members of another batch are sent."""
MEMBERS_AHEAD = 2
"""Number of members whose screenshots are read while another member is sent."""
BATCH_MEMBERS = 16
BATCH_BYTES = 512 * 1024
"""A batch ends when it reaches one of these two limits; screenshots are not counted in its bytes."""

Result = TypeVar("Result", covariant=True)
_Wanted = tuple[int, DeliveredMember, BlobRef | None]
"""(key of the job, member, ref of its payload, which is None if no pack has the payload)."""
_Read = tuple[int, DeliveredMember, bytes | DamagedError]
"""(key of the job, member, payload or why it cannot be read)."""
_Finished = tuple[int, DeliveredMember, Pieces | DamagedError]
"""As ``_Read``, with the payload in pieces and its screenshots inlined if the client wants them."""

logger = logging.getLogger(__name__)


class InProgress(Protocol[Result]):
    """Work in progress, as a ``Future``."""

    def result(self) -> Result:
        """Waits for the result."""

    def cancel(self) -> object:
        """Cancels the work."""


class DeliveredMembers:
    """Reads the deliveries of one store. Safe to use from many threads."""

    def __init__(self, store: Store, payloads: PayloadStore) -> None:
        self._store = store
        self._payloads = payloads
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="reads ahead")

    def items(self, delivery_key: int, *, inline_images: bool) -> Iterator[tuple[dict[str, Any], Pieces]]:
        """Yields the members of a delivery as (keys from columns, payload JSON in pieces)."""
        started = (self._pool.submit(self._read_batch, batch) for batch in self._split(delivery_key))
        batches = _prefetch(started, BATCHES_AHEAD)
        members = _prefetch((self._inline(read, inline_images) for batch in batches for read in batch), MEMBERS_AHEAD)
        for job_key, member, pieces in members:
            if isinstance(pieces, DamagedError):
                yield self._dummy_for(job_key, member, pieces)
            else:
                yield _delivery_columns(member), pieces

    def _split(self, delivery_key: int) -> Iterator[list[_Wanted]]:
        """Splits the members into batches whose payloads are read together."""
        with self._store.read() as connection:
            groups = delivery_rows.groups_in_delivery(connection, delivery_key)
        batch: list[_Wanted] = []
        size = 0
        for group in groups:
            with self._store.read() as connection:
                members = delivery_rows.delivered_members(connection, group.key)
            for member in members:
                ref = None if member.body_place is None else BlobRef.parse(member.body_place)
                batch.append((group.job_key, member, ref))
                size += 0 if ref is None else ref.length
                if len(batch) >= BATCH_MEMBERS or size >= BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _read_batch(self, batch: Sequence[_Wanted]) -> list[_Read]:
        bodies = self._fetch([ref for _, _, ref in batch if ref is not None])
        return [
            (job_key, member, bodies[ref] if ref is not None else _body_of_row(member))
            for job_key, member, ref in batch
        ]

    def _fetch(self, refs: Sequence[BlobRef]) -> dict[BlobRef, bytes | DamagedError]:
        """Reads payloads together; if one of them is damaged, reads each separately."""
        try:
            return {ref: bytes(data) for ref, data in self._store.fetch_each(refs)}
        except DamagedError as error:
            if len(refs) == 1:
                return {refs[0]: error}
            return {key: value for ref in refs for key, value in self._fetch([ref]).items()}

    def _inline(self, read: _Read, inline_images: bool) -> InProgress[_Finished]:
        """Starts to replace the hashes of a member's screenshots by the screenshots, if they are wanted."""
        job_key, member, body = read
        if isinstance(body, DamagedError):
            return _completed((job_key, member, body))
        if not inline_images or not wire.may_have_screenshots(body):
            return _completed((job_key, member, [body]))
        try:
            return _MemberWithScreenshots(job_key, member, self._payloads.begin_inlining(body, self._pool))
        except DamagedError as error:
            return _completed((job_key, member, error))

    def _dummy_for(self, job_key: int, member: DeliveredMember, error: DamagedError) -> tuple[dict[str, Any], Pieces]:
        """Returns a dummy for a member that cannot be read; records the damage, unless the payload was purged."""
        if not _is_purged(member):
            logger.error("trajectory %s cannot be read and is delivered as a dummy: %s", member.uid, error.message)
            uid = member.source_uid or member.uid
            try:
                with self._store.write() as connection:
                    payload_rows.mark_damaged(connection, job_key, uid, error.message[:500])
            except (StorageFullError, UnavailableError) as failure:
                logger.error("the damage of trajectory %s could not be recorded: %s", member.uid, failure.message)
        return _delivery_columns(member, damaged=True), [_dummy_body(error.message)]


@dataclass(frozen=True, slots=True)
class _MemberWithScreenshots:
    """A member whose screenshots are being read."""

    job_key: int
    member: DeliveredMember
    inlining: Inlining

    def result(self) -> _Finished:
        try:
            return self.job_key, self.member, self.inlining.result()
        except DamagedError as error:
            return self.job_key, self.member, error

    def cancel(self) -> None:
        self.inlining.cancel()


def _completed(result: _Finished) -> Future[_Finished]:
    done: Future[_Finished] = Future()
    done.set_result(result)
    return done


def _prefetch(started: Iterable[InProgress[Result] | Future[Result]], count: int) -> Iterator[Result]:
    """Yields results in order, while the next ``count`` are in progress."""
    waiting: deque[InProgress[Result] | Future[Result]] = deque()
    try:
        for work in started:
            waiting.append(work)
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for work in waiting:
            work.cancel()


def only_played(
    members: Iterable[tuple[dict[str, Any], Pieces]], at_least: int
) -> Iterator[tuple[list[tuple[dict[str, Any], Pieces]], ShortGroup | None]]:
    """Yields groups without their dummies, for clients that would train a dummy with a reward of 0.

    A group is yielded as its played members (none of them if they are fewer than ``at_least``), and its description if
    a member is missing.
    """
    for group_index, group_members in groupby(members, key=lambda member: int(member[0]["group_index"])):
        group = list(group_members)
        played = [member for member in group if not member[0]["remove_sample"]]
        delivered = len(played) >= at_least
        short = ShortGroup(
            group_index=group_index,
            instance_id=group[0][0]["instance_id"],
            members=len(played),
            group_size=len(group),
            delivered=delivered,
        )
        yield played if delivered else [], None if len(played) == len(group) else short


def _dummy_body(error: str | None = None) -> bytes:
    extra_info = {"dummy": True} if error is None else {"dummy": True, "error": error}
    return orjson.dumps({"messages": [], "extra_info": extra_info, "generations": [], "images": []})


def _is_purged(member: DeliveredMember) -> bool:
    """Returns True for a played member without a payload: retention has purged it."""
    return member.source_uid is not None and member.body is None and member.body_place is None


def _body_of_row(member: DeliveredMember) -> bytes | DamagedError:
    if _is_purged(member):
        return DamagedError("the payload of this trajectory was purged by retention")
    try:
        return checked_body(member.body) if member.body else _dummy_body()
    except DamagedError as error:
        return error


def _delivery_columns(member: DeliveredMember, *, damaged: bool = False) -> dict[str, Any]:
    """Returns the keys of a delivered member that come from columns; a damaged one is marked as a dummy."""
    return {
        "uid": member.uid,
        "instance_id": member.instance_id,
        "reward": 0.0 if member.reward is None or damaged else member.reward,
        "raw_reward": None if damaged else member.raw_reward,
        "group_index": member.group_key,
        "weight_version": member.oldest_version,
        "epoch": member.epoch,
        "slot": member.slot,
        "outcome": Outcome.FAILED.value if damaged else member.outcome,
        "stop_reason": member.stop_reason,
        "remove_sample": member.remove_sample or damaged,
    }
