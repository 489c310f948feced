"""Recovers packs and rows when the supervisor starts after a crash.

After a crash a pack may end with records that no row refers to: the process died before their commit, so that they were
never acknowledged. They are truncated. Rows whose records are missing come from a damaged disk, not from a crash:
they are reported and marked, and their trajectories are delivered as dummies.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.storage.data_dir import try_lock
from slime_plugins.rollout_buffer.storage.pack_writer import SEALED_MODE, pack_path, packs_in
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows, pack_rows, payload_rows

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RecoveryReport:
    """Results of a recovery. ``damaged`` has a message for each trajectory or image whose bytes are missing."""

    cut_bytes: int = 0
    removed_packs: int = 0
    damaged: list[str] = field(default_factory=list)


def recover(store: Store) -> RecoveryReport:
    """Truncates unreferenced records, and marks rows whose records are missing.

    Packs that a living process holds are skipped. Only the process that owns the data directory may call this.
    """
    report = RecoveryReport()
    for number in packs_in(store.packs_dir):
        _truncate(store, number, report)
    used = _used_lengths(store)
    short_packs = {number: size for number, end in used.items() if (size := _size(store.packs_dir, number)) < end}
    if short_packs:
        _mark_damaged(store, short_packs, report)
    if report.cut_bytes or report.removed_packs:
        logger.info(
            "truncated %d bytes of packs and removed %d unreferenced packs", report.cut_bytes, report.removed_packs
        )
    for sentence in report.damaged[:100]:
        logger.error("%s", sentence)
    return report


def _truncate(store: Store, number: int, report: RecoveryReport) -> None:
    path = pack_path(store.packs_dir, number)
    if not path.stat().st_mode & 0o200:
        return  # sealed: its rows may not be committed yet
    descriptor = os.open(path, os.O_RDWR)
    try:
        if not try_lock(descriptor):
            return
        # Read under the lock: a process that has just ended may have added rows.
        end = _used_lengths(store).get(number, 0)
        size = os.fstat(descriptor).st_size
        if end == 0:
            path.unlink()
            report.removed_packs += 1
        elif size > end:
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)
        report.cut_bytes += max(0, size - end)
        os.fchmod(descriptor, SEALED_MODE)
    finally:
        os.close(descriptor)


def _used_lengths(store: Store) -> dict[int, int]:
    """Returns up to which byte rows refer to each pack."""
    with store.read() as connection:
        return pack_rows.used_pack_lengths(connection)


def _size(folder: Path, number: int) -> int:
    """Returns the size of a pack in bytes; -1 if its file is missing."""
    try:
        return pack_path(folder, number).stat().st_size
    except FileNotFoundError:
        return -1


def _mark_damaged(store: Store, short_packs: dict[int, int], report: RecoveryReport) -> None:
    """Marks trajectories whose record is beyond the end of its pack; reports these, and images of the same kind.

    ``short_packs`` has the sizes of the packs that end too early.
    """
    with store.write() as connection:
        for job_key, uid, ref in list(payload_rows.payload_refs(connection)):
            if ref.end > short_packs.get(ref.pack, ref.end):
                why = f"the payload at {ref} is gone: its pack ends before"
                payload_rows.mark_damaged(connection, job_key, uid, why)
                report.damaged.append(f"trajectory {uid} is lost: {why}")
        for sha256, ref in image_rows.all_image_refs(connection):
            if ref.end > short_packs.get(ref.pack, ref.end):
                report.damaged.append(f"image {sha256} is lost: its pack ends before {ref}")
