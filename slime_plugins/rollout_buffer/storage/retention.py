"""Retention: purges old payloads and screenshots; rows (reward, outcome, accounting) are kept.

All payloads written before one point in time are purged, and packs without referenced records are removed. The point is
never later than the oldest trajectory that is still to be delivered. ``serve_settings.retain_delivered_s`` is the age.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime_plugins.rollout_buffer.storage.pack_writer import is_locked, pack_path, packs_in
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    clock_rows,
    image_rows,
    pack_rows,
    payload_rows,
    trainer_rows,
    turn_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Purged:
    """Numbers of payloads, images and packs that one pass removed."""

    payloads: int
    images: int
    packs: int
    bytes: int = field(default=0, compare=False)
    """Size of the removed packs: only they free disk space."""


def purge(store: Store, *, now: float, retain_s: float) -> Purged:
    """Purges payloads older than ``retain_s`` and older than any trajectory that is still to be delivered.

    A screenshot is purged if no younger trajectory names it. A write that names a screenshot while it is being purged
    fails as unavailable; the client repeats it with the screenshot.
    """
    with store.write() as connection:
        payloads, images = _purge_rows(connection, now, retain_s)
    removed, size = _remove_empty_packs(store)
    if payloads or images or removed:
        logger.info("purged %d payloads and %d screenshots, removed %d packs", payloads, images, removed)
    return Purged(payloads, images, removed, size)


def would_purge(store: Store, *, now: float, retain_s: float) -> Purged:
    """Returns the numbers that ``purge`` would return now: runs its queries and rolls them back."""
    packs = size = 0
    with store.write() as connection, _rolled_back(connection):
        payloads, images = _purge_rows(connection, now, retain_s)
        for number in _packs_without_contents(store, connection):
            path = pack_path(store.packs_dir, number)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if not is_locked(descriptor):
                    packs, size = packs + 1, size + os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
    return Purged(payloads, images, packs, size)


@contextmanager
def _rolled_back(connection: Connection) -> Iterator[None]:
    connection.execute("SAVEPOINT dry_run")
    try:
        yield
    finally:
        connection.execute("ROLLBACK TO dry_run")
        connection.execute("RELEASE dry_run")


def _purge_rows(connection: Connection, now: float, retain_s: float) -> tuple[int, int]:
    before = now - retain_s
    before -= clock_rows.jumped_since(connection, before)  # a clock set forward by a day ages nothing
    turn_rows.purge_turns(connection, before)
    turn_rows.purge_rollouts(connection, before)
    before = min(before, payload_rows.oldest_undelivered(connection, now))
    trainer_rows.purge_log_probs(connection, before)
    attempt_rows.purge_transcripts(connection, before)
    images = image_rows.purge_images(connection, min(before, turn_rows.oldest_turn(connection, now)))
    return payload_rows.purge_payloads(connection, before), images


def _packs_without_contents(store: Store, connection: Connection) -> list[int]:
    needed = pack_rows.referenced_packs(connection)
    recorded = set(pack_rows.used_pack_lengths(connection))
    # Rows that refer to a pack without a row may not be committed yet: recovery handles it.
    return [number for number in packs_in(store.packs_dir) if number in recorded and number not in needed]


def _remove_empty_packs(store: Store) -> tuple[int, int]:
    """Removes unreferenced packs that no process appends to; returns their number and size."""
    removed = size = 0
    with store.read() as connection:
        empty = _packs_without_contents(store, connection)
    for number in empty:
        path = pack_path(store.packs_dir, number)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if is_locked(descriptor):
                continue
            with store.write() as connection:
                if number in pack_rows.referenced_packs(connection):
                    continue
                pack_rows.delete_pack(connection, number)
            size += os.fstat(descriptor).st_size
            path.unlink(missing_ok=True)
            removed += 1
        finally:
            os.close(descriptor)
    return removed, size
