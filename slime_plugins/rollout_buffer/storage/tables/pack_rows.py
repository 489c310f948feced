"""Rows of ``packs``: up to which byte each pack is referenced by rows."""

from __future__ import annotations

from collections.abc import Iterable

from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def mark_packs_used(connection: Connection, refs: Iterable[BlobRef]) -> None:
    """Records the end of the last referenced record of each pack: recovery may truncate what follows."""
    ends: dict[int, int] = {}
    for ref in refs:
        ends[ref.pack] = max(ref.end, ends.get(ref.pack, 0))
    connection.executemany(
        "INSERT INTO packs (number, used_to) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
        "used_to = max(used_to, excluded.used_to)",
        list(ends.items()),
    )


def referenced_packs(connection: Connection, *, purged_to: int = 0, images_purged_before: float = 0.0) -> set[int]:
    """Returns the packs that images or trajectories refer to, without trajectories up to the key ``purged_to`` and
    images that were last used before a time."""
    query = (
        "SELECT DISTINCT CAST(substr(place, 1, instr(place, ':') - 1) AS INTEGER) FROM images WHERE last_used >= ? "
        "UNION SELECT DISTINCT CAST(substr(body_place, 1, instr(body_place, ':') - 1) AS INTEGER) FROM trajectories "
        "WHERE key > ? AND body_place IS NOT NULL"
    )
    return {int(row[0]) for row in connection.execute(query, (images_purged_before, purged_to))}


def used_pack_lengths(connection: Connection) -> dict[int, int]:
    """Returns the end of the last referenced record by pack."""
    return {row[0]: row[1] for row in connection.execute("SELECT number, used_to FROM packs")}


def delete_pack(connection: Connection, number: int) -> None:
    connection.execute("DELETE FROM packs WHERE number = ?", (number,))
