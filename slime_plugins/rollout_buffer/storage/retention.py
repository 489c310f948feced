"""Retention: purges old payloads and screenshots; rows (reward, outcome, accounting) are kept.

All payloads written before one point in time are purged, and packs without referenced records are removed. The point is
``serve_settings.retain_delivered_s`` ago. It is earlier if an older trajectory is still to be delivered, or was
delivered within the last ``retain_delivered_s``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from slime_plugins.rollout_buffer.storage.data_dir import try_lock
from slime_plugins.rollout_buffer.storage.pack_writer import pack_path, packs_in
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

PURGED_AT_ONCE = 1000
"""At most this many payloads are purged in one transaction: other writers wait meanwhile."""

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
    """Purges payloads older than ``retain_s``, but none still to be delivered, or delivered less than ``retain_s`` ago.

    A screenshot is purged if no kept trajectory and no stored turn may name it. A write that names a screenshot while
    it is being purged fails as unavailable; the client repeats it with the screenshot.
    """
    payloads = images = 0
    more = True
    while more:
        with store.write() as connection:
            purged_payloads, purged_images, more = _purge_rows(connection, now, retain_s, PURGED_AT_ONCE)
        payloads, images = payloads + purged_payloads, images + purged_images
    sizes = _remove_unreferenced_packs(store)
    if payloads or images or sizes:
        logger.info("purged %d payloads and %d screenshots, removed %d packs", payloads, images, len(sizes))
    return Purged(payloads, images, len(sizes), sum(sizes))


def would_purge(store: Store, *, now: float, retain_s: float) -> Purged:
    """Returns the numbers that ``purge`` would return now; only reads."""
    with store.read() as connection:
        before = clock_rows.time_of_age(connection, now, retain_s)
        oldest_kept_turn = turn_rows.oldest_kept_turn(connection, before, now)
        before = min(before, payload_rows.oldest_needed(connection, before, now))
        newest, _ = payload_rows.newest_to_purge(connection, before, -1)
        payloads = payload_rows.count_payloads(connection, newest)
        before = min(before, oldest_kept_turn)
        images = image_rows.count_images(connection, before)
        referenced = pack_rows.referenced_packs(connection, purged_to=newest, images_purged_before=before)
        sizes = [size for _, size in _unreferenced_packs(store, referenced)]
    return Purged(payloads, images, len(sizes), sum(sizes))


def _purge_rows(connection: Connection, now: float, retain_s: float, limit: int) -> tuple[int, int, bool]:
    """Purges rows; returns the numbers of purged payloads and screenshots, and whether more payloads may be left.

    At most ``limit`` payloads are purged.
    """
    before = clock_rows.time_of_age(connection, now, retain_s)
    turn_rows.purge_turns(connection, before)
    turn_rows.purge_rollouts(connection, before)
    before = min(before, payload_rows.oldest_needed(connection, before, now))
    trainer_rows.purge_log_probs(connection, before)
    attempt_rows.purge_transcripts(connection, before)
    newest, more = payload_rows.newest_to_purge(connection, before, limit)
    payloads = payload_rows.purge_payloads(connection, newest)
    before = min(before, turn_rows.oldest_kept_turn(connection, before, now))
    images = 0 if more else image_rows.purge_images(connection, before)  # after all payloads that name them
    return payloads, images, more


def _unreferenced_packs(store: Store, referenced: Container[int]) -> Iterator[tuple[int, int]]:
    """Yields number and size of each pack that is not in ``referenced`` and that no process appends to.

    The pack is locked until the next one is asked for.
    """
    for number in packs_in(store.packs_dir):
        if number in referenced:
            continue
        descriptor = os.open(pack_path(store.packs_dir, number), os.O_RDONLY)
        try:
            if try_lock(descriptor):
                yield number, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)


def _remove_unreferenced_packs(store: Store) -> list[int]:
    """Removes packs that no row refers to; returns their sizes.

    A row that will refer to such a pack, but is not committed yet, is refused: ``StoredPayload.record`` looks for the
    file in the transaction of the row.
    """
    with store.read() as connection:
        if not any(_unreferenced_packs(store, pack_rows.referenced_packs(connection))):
            return []
    sizes = []
    with store.write() as connection:
        for number, size in _unreferenced_packs(store, pack_rows.referenced_packs(connection)):
            pack_path(store.packs_dir, number).unlink()
            pack_rows.delete_pack(connection, number)
            sizes.append(size)
    return sizes
