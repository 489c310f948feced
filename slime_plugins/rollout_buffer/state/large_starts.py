"""Jobs of very many groups: written in parts, so that other writers get their turn between them.

The rows come first, under a key that no job has yet, and the job itself last, in one transaction: until then nobody
sees, plays or delivers any of it. A start that was interrupted is undone, by the same call made again or at the next
start of ``serve``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import orjson

from slime_plugins.rollout_buffer.errors import RolloutBufferError, UnavailableError
from slime_plugins.rollout_buffer.protocol.request_models import StartPayload
from slime_plugins.rollout_buffer.rules.skip_list import PlannedGroup, plan_groups
from slime_plugins.rollout_buffer.state import job_start
from slime_plugins.rollout_buffer.state.job_start import StartedJob
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, job_rows, start_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import Instance

__all__ = ["is_large", "start_large", "take_over_large", "undo_interrupted"]

ROWS_AT_ONCE = 10_000
"""Groups up to here are written with their job. So many rows take a fraction of a second."""
SILENT_S = 60.0
"""A start that has written nothing for so long was interrupted."""

Row = TypeVar("Row")

logger = logging.getLogger(__name__)


def is_large(payload: StartPayload, instances: Sequence[Instance]) -> bool:
    """Tells whether a job is to be written in parts."""
    return len(instances) * max(1, payload.num_epoch) > ROWS_AT_ONCE


def start_large(
    store: Store, clock: Callable[[], float], payload: StartPayload, instances: Sequence[Instance]
) -> StartedJob:
    """Makes a payload a job, as ``job_start.start_job`` does, in many transactions.

    Raises:
        UnavailableError: the same job is being started already; once it is there, the same call attaches to it.
    """
    key = _begin(store, clock, payload)
    try:
        for part in _parts(key, payload, instances):
            _write(store, clock, key, part)
        with store.write() as connection:
            if not start_rows.delete_start(connection, key):
                raise _taken_over()
            return job_start.start_job(connection, clock(), payload, instances, written_as=key)
    except BaseException:
        with contextlib.suppress(RolloutBufferError):  # what cannot be undone now is undone later
            _undo(store, key)
        raise


def take_over_large(
    store: Store, clock: Callable[[], float], job_key: int, payload: StartPayload, instances: Sequence[Instance]
) -> StartedJob:
    """Gives a job that waits for a trainer the trainer's input, in many transactions; made again, it goes on."""
    for some_instances in _cut(instances, max(1, ROWS_AT_ONCE // payload.num_epoch)):
        store.check_room()
        with store.write() as connection:
            job_start.add_input(connection, job_key, payload, some_instances)
    with store.write() as connection:
        return job_start.start_job(connection, clock(), payload, instances, has_input_already=True)


def undo_interrupted(store: Store) -> int:
    """Removes what starts have left that were interrupted; returns how many. For who knows that none is under way."""
    with store.read() as connection:
        interrupted = start_rows.all_starts(connection)
    for start in interrupted:
        logger.warning("the start of a job was interrupted after %d rows: they are removed", start.written)
        _undo(store, start.job_key)
    return len(interrupted)


def _begin(store: Store, clock: Callable[[], float], payload: StartPayload) -> int:
    identity = payload.identity()
    with store.write() as connection:
        earlier = start_rows.find_start(connection, identity, payload.job_id)
        if earlier is not None and abs(clock() - earlier.touched_at) < SILENT_S:
            raise UnavailableError(f"this job is being started ({earlier.written} rows are written): ask again")
    if earlier is not None:
        _undo(store, earlier.job_key)
    with store.write() as connection:
        key = job_rows.next_key(connection)
        start_rows.insert_start(connection, key, identity, payload.job_id, clock())
    return key


_Part = Callable[[Connection], int]
"""Writes some rows and returns how many."""


def _parts(key: int, payload: StartPayload, instances: Sequence[Instance]) -> Iterator[_Part]:
    ids = [instance.instance_id for instance in instances]
    lines = ((at, ids[at], orjson.dumps(instance.data)) for at, instance in enumerate(instances))
    for some_lines in _cut(lines):
        yield partial(_insert_lines, key=key, lines=some_lines)
    planned = plan_groups(ids, payload.num_epoch, map(str, payload.skip_instance_ids or ()))
    for some_groups in _cut(planned):
        yield partial(_insert_groups, key=key, ids=ids, planned=some_groups)


def _insert_lines(connection: Connection, *, key: int, lines: list[tuple[int, str, bytes]]) -> int:
    group_rows.insert_instances(connection, key, lines)
    return len(lines)


def _insert_groups(connection: Connection, *, key: int, ids: Sequence[str], planned: list[PlannedGroup]) -> int:
    group_rows.insert_groups(connection, key, ids, planned)
    return len(planned)


def _cut(rows: Iterable[Row], size: int | None = None) -> Iterator[list[Row]]:
    left = iter(rows)
    while part := list(islice(left, size or ROWS_AT_ONCE)):
        yield part


def _write(store: Store, clock: Callable[[], float], key: int, part: _Part) -> None:
    store.check_room()
    with store.write(foreign_keys=False) as connection:  # the job that the rows belong to comes last
        if not start_rows.touch_start(connection, key, part(connection), clock()):
            raise _taken_over()


def _undo(store: Store, key: int) -> None:
    left = True
    while left:
        with store.write(foreign_keys=False) as connection:
            left = start_rows.delete_some_rows(connection, key, ROWS_AT_ONCE)
    with store.write() as connection:
        start_rows.delete_start(connection, key)


def _taken_over() -> UnavailableError:
    return UnavailableError("the start of this job was undone by a later one: ask again")
