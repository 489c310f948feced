"""What a crash leaves behind, put in order at the next start; and a look at every stored byte for whoever asks.

After a crash a pack may end with bytes that no row names: they were on their way when the process died, and nobody was
told that they are safe. They are cut off. The other way round, rows whose bytes are gone, is not a crash but a damaged
disk: those rows are reported and marked, their trajectories go out as dummies, and everything else goes on.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.storage.pack_writer import (
    SEALED_MODE,
    BlobRef,
    is_locked,
    pack_path,
    packs_in,
)
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows, pack_rows, payload_rows

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RecoveryReport:
    """What was found and done. ``damaged`` names trajectories and images whose bytes are gone, a sentence each."""

    cut_bytes: int = 0
    removed_packs: int = 0
    damaged: list[str] = field(default_factory=list)


def recover(store: Store) -> RecoveryReport:
    """Cuts off what no row names, and marks rows whose bytes are gone.

    Packs that a living process holds are left alone.

    Only the process that owns the data directory may call this.
    """
    report = RecoveryReport()
    with store.read() as connection:
        used = pack_rows.used_pack_lengths(connection)
    for number in packs_in(store.packs_dir):
        _cut(pack_path(store.packs_dir, number), used.get(number, 0), report)
    short = {number: size for number, end in used.items() if (size := _size(store.packs_dir, number)) < end}
    if short:
        _mark(store, short, report)
    if report.cut_bytes or report.removed_packs:
        logger.info(
            "cut %d bytes off packs and removed %d packs that no row names", report.cut_bytes, report.removed_packs
        )
    for sentence in report.damaged[:100]:
        logger.error("%s", sentence)
    return report


def _cut(path: Path, end: int, report: RecoveryReport) -> None:
    if not path.stat().st_mode & 0o200:
        return  # sealed: its rows may still be on their way
    descriptor = os.open(path, os.O_RDWR)
    try:
        if is_locked(descriptor):
            return
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


def _size(folder: Path, number: int) -> int:
    try:
        return pack_path(folder, number).stat().st_size
    except FileNotFoundError:
        return -1


def _mark(store: Store, short: dict[int, int], report: RecoveryReport) -> None:
    """Marks the trajectories whose place lies beyond the end of its pack; images are named in the report."""
    with store.write() as connection:
        for job_key, uid, place in list(payload_rows.payload_refs(connection)):
            if place.end > short.get(place.pack, place.end):
                why = f"the payload at {place} is gone: its pack ends before"
                payload_rows.mark_damaged(connection, job_key, uid, why)
                report.damaged.append(f"trajectory {uid} is lost: {why}")
        for sha256, place in image_rows.all_image_refs(connection):
            if place.end > short.get(place.pack, place.end):
                report.damaged.append(f"image {sha256} is lost: its pack ends before {place}")


def examine(store: Store) -> Iterator[str]:
    """Reads every stored payload and screenshot and yields a sentence for each that is not what was written."""
    with store.read() as connection:
        images = dict(image_rows.all_image_refs(connection))
        bodies = list(payload_rows.payload_refs(connection))
    for sha256, place in images.items():
        try:
            if hashlib.sha256(store.fetch(place)).hexdigest() != sha256:
                yield f"image {sha256}: the bytes at {place} hash to something else"
        except DamagedError as error:
            yield f"image {sha256}: {error.message}"
    for _, uid, place in bodies:
        yield from _examine_body(store, uid, place, images)


def _examine_body(store: Store, uid: str, place: BlobRef, images: dict[str, BlobRef]) -> Iterator[str]:
    try:
        body = bytes(store.fetch(place))
    except DamagedError as error:
        yield f"trajectory {uid}: {error.message}"
        return
    for sha256 in wire.image_hashes(body):
        if sha256 not in images:
            yield f"trajectory {uid} shows image {sha256}, which is not stored"
    for sha256 in wire.named_records(body):
        if sha256 not in images:
            yield f"trajectory {uid} names token records {sha256}, which are not stored"
