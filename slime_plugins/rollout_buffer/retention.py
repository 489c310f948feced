"""Forgetting: what was handed out long ago gives its bytes back; its row (reward, outcome, books) stays.

Payloads and screenshots lie in packs, so the oldest go first and a pack goes as a whole. Nothing is forgotten while its
group is still to be delivered, nor anything younger than that: one line in time, everything before it is released.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from slime_plugins.rollout_buffer import tables
from slime_plugins.rollout_buffer.packs import is_locked, pack_path, packs_in
from slime_plugins.rollout_buffer.store import Store

__all__ = ["Forgotten", "forget"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What one pass gave back."""

    payloads: int
    images: int
    packs: int


def forget(store: Store, *, now: float, retain_s: float) -> Forgotten:
    """Forgets the bytes of trajectories that are older than ``retain_s`` and older than any still to be delivered.

    A screenshot goes when no younger trajectory named it. A trajectory that names one while it is being forgotten is
    refused as unavailable, and written again with the screenshot.
    """
    with store.write() as connection:
        before = min(now - retain_s, tables.oldest_undelivered(connection, now))
        payloads = tables.forget_payloads(connection, before)
        images = tables.forget_images(connection, before)
    removed = _remove_empty_packs(store)
    if payloads or images or removed:
        logger.info("forgot %d payloads and %d screenshots, removed %d packs", payloads, images, removed)
    return Forgotten(payloads, images, removed)


def _remove_empty_packs(store: Store) -> int:
    """Removes packs that no row names a byte of and no process appends to."""
    removed = 0
    with store.read() as connection:
        needed = tables.packs_with_contents(connection)
        recorded = set(tables.used_packs(connection))
    # A pack that was never recorded may hold bytes whose rows are on their way: mending looks after those.
    for number in packs_in(store.packs_dir):
        if number in needed or number not in recorded:
            continue
        path = pack_path(store.packs_dir, number)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if is_locked(descriptor):
                continue
            with store.write() as connection:
                if number in tables.packs_with_contents(connection):
                    continue
                tables.drop_pack(connection, number)
            path.unlink(missing_ok=True)
            removed += 1
        finally:
            os.close(descriptor)
    return removed
