"""Columns of ``trajectories`` that hold a payload: in the row, or as a reference to a pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.tables.connection import Connection


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
    """Returns the groups without a purged payload."""
    query = (
        "SELECT count(*) FROM members JOIN groups ON groups.key = members.group_key JOIN trajectories "
        "ON trajectories.job_key = groups.job_key AND trajectories.uid = members.source_uid "
        "WHERE members.group_key = ? AND body IS NULL AND body_place IS NULL"
    )
    return [key for key in group_keys if connection.execute(query, (key,)).fetchone()[0] == 0]


def oldest_undelivered(connection: Connection, default: float) -> float:
    """Returns the time at which the oldest undelivered trajectory was written."""
    query = (
        "SELECT min(trajectories.created_at) FROM groups JOIN trajectories ON group_key = groups.key "
        "WHERE groups.state IN ('open', 'ready', 'leased')"
    )
    found = connection.execute(query).fetchone()[0]
    return default if found is None else float(found)


def purge_payloads(connection: Connection, before: float) -> int:
    """Removes the payloads of trajectories written before a time; returns their number."""
    return connection.execute(
        "UPDATE trajectories SET body = NULL, body_place = NULL "
        "WHERE created_at < ? AND (body IS NOT NULL OR body_place IS NOT NULL)",
        (before,),
    ).rowcount


def mark_damaged(connection: Connection, job_key: int, uid: str, damage: str) -> None:
    """Records why a trajectory's payload could not be read."""
    query = "UPDATE trajectories SET damage = ? WHERE job_key = ? AND uid = ?"
    connection.execute(query, (damage, job_key, uid))


def count_damaged(connection: Connection, job_key: int) -> int:
    """Counts trajectories whose payload could not be read."""
    query = "SELECT count(*) FROM trajectories WHERE job_key = ? AND damage IS NOT NULL"
    return int(connection.execute(query, (job_key,)).fetchone()[0])
