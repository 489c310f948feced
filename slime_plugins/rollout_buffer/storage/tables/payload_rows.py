"""Columns of ``trajectories`` that hold a payload: in the row, or as a reference to a pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

_PURGED = "(SELECT coalesce(max(last), 0) FROM counters WHERE name = 'purged trajectory')"
"""In SQL: the key of the newest trajectory whose payload was purged. No older trajectory has a payload."""
_TO_PURGE = f"key > {_PURGED} AND key <= ? AND (body IS NOT NULL OR body_place IS NOT NULL)"


def payload_of(connection: Connection, job_key: int, uid: str) -> tuple[bytes | None, str | None]:
    """Returns (bytes in the row, text of the ref to a pack) of a trajectory's payload; both None after a purge."""
    query = "SELECT body, body_place FROM trajectories WHERE job_key = ? AND uid = ?"
    row = connection.execute(query, (job_key, uid)).fetchone()
    return row["body"], row["body_place"]


def payload_refs(connection: Connection) -> Iterator[tuple[int, str, BlobRef]]:
    """Yields (job key, uid, ref) of every payload in a pack."""
    query = "SELECT job_key, uid, body_place FROM trajectories WHERE body_place IS NOT NULL"
    return ((row[0], row[1], BlobRef.parse(row[2])) for row in connection.execute(query))


def groups_with_payloads(connection: Connection, group_keys: Sequence[int]) -> list[int]:
    """Returns those of the groups of which no payload was purged."""
    query = "SELECT 1 FROM trajectories WHERE group_key = ? AND late = 0 AND body IS NULL AND body_place IS NULL"
    return [key for key in group_keys if connection.execute(query, (key,)).fetchone() is None]


def oldest_needed(connection: Connection, delivered_since: float, default: float) -> float:
    """Returns when the oldest needed trajectory was written; ``default`` if none is needed.

    A trajectory is needed if it may still be delivered, or was delivered after ``delivered_since``. The oldest of them
    need not have the lowest key, because the clock may have been set back. The query reads the times from an index,
    which does not hold the payloads.
    """
    query = (
        "SELECT min(written.created_at) FROM groups JOIN trajectories AS found ON found.group_key = groups.key "
        "JOIN trajectories AS written INDEXED BY trajectories_to_look_at ON written.job_key = groups.job_key "
        f"AND written.key = +found.key WHERE found.key > {_PURGED} AND (groups.state IN ('open', 'ready', 'leased') "
        "OR groups.delivery_key IN (SELECT key FROM deliveries WHERE created_at >= ?))"
    )
    oldest = connection.execute(query, (delivered_since,)).fetchone()[0]
    return default if oldest is None else float(oldest)


def newest_to_purge(connection: Connection, before: float, limit: int) -> tuple[int, bool]:
    """Returns the key of the newest of at most ``limit`` trajectories, oldest first, up to the first that was written
    after ``before``, and whether further ones may have to be purged; the key is 0 without any.

    It does not look at later rows: in a row the payload stands before ``created_at``, so that SQLite would read all
    payloads.
    """
    query = f"SELECT key, created_at FROM trajectories WHERE key > {_PURGED} ORDER BY key LIMIT ?"
    keys = [key for key, _ in takewhile(lambda row: row[1] < before, connection.execute(query, (limit,)))]
    return (keys[-1] if keys else 0), len(keys) == limit


def count_payloads(connection: Connection, newest: int) -> int:
    """Counts the payloads that ``purge_payloads`` would remove."""
    return int(connection.execute(f"SELECT count(*) FROM trajectories WHERE {_TO_PURGE}", (newest,)).fetchone()[0])


def purge_payloads(connection: Connection, newest: int) -> int:
    """Removes the payloads of trajectories up to the key ``newest``; returns their number."""
    if newest == 0:
        return 0
    query = f"UPDATE trajectories SET body = NULL, body_place = NULL WHERE {_TO_PURGE}"
    purged = connection.execute(query, (newest,)).rowcount
    query = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET last = excluded.last"
    connection.execute(query, ("purged trajectory", newest))
    return purged


def mark_damaged(connection: Connection, job_key: int, uid: str, damage: str) -> None:
    """Records why a trajectory's payload could not be read."""
    query = "UPDATE trajectories SET damage = ? WHERE job_key = ? AND uid = ?"
    connection.execute(query, (damage, job_key, uid))


def count_damaged(connection: Connection, job_key: int) -> int:
    """Counts trajectories whose payload could not be read."""
    query = "SELECT count(*) FROM trajectories WHERE job_key = ? AND damage IS NOT NULL"
    return int(connection.execute(query, (job_key,)).fetchone()[0])
