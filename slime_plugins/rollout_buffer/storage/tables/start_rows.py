"""Rows of ``starts``: jobs whose groups are being written, in parts, before the job itself is there."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord:
    """A row of ``starts``."""

    job_key: int
    identity: str
    job_id: str | None
    touched_at: float
    written: int


def insert_start(connection: Connection, job_key: int, identity: str, job_id: str | None, now: float) -> None:
    """Notes that a job's groups are about to be written under a key."""
    query = "INSERT INTO starts (job_key, identity, job_id, touched_at, written) VALUES (?, ?, ?, ?, 0)"
    connection.execute(query, (job_key, identity, job_id, now))


def touch_start(connection: Connection, job_key: int, written: int, now: float) -> bool:
    """Notes how many rows there are; False when somebody has undone the start."""
    query = "UPDATE starts SET touched_at = ?, written = written + ? WHERE job_key = ?"
    return connection.execute(query, (now, written, job_key)).rowcount == 1


def delete_start(connection: Connection, job_key: int) -> bool:
    """Ends a start: its rows belong to a job from now on, or are gone. False when it had ended before."""
    return connection.execute("DELETE FROM starts WHERE job_key = ?", (job_key,)).rowcount == 1


def all_starts(connection: Connection) -> list[StartRecord]:
    """Returns the starts that are under way, or were interrupted."""
    return [_as_start(row) for row in connection.execute("SELECT * FROM starts ORDER BY job_key")]


def find_start(connection: Connection, identity: str, job_id: str | None) -> StartRecord | None:
    """Returns the start of the same payload."""
    row = connection.execute("SELECT * FROM starts WHERE identity = ? AND job_id IS ?", (identity, job_id)).fetchone()
    return None if row is None else _as_start(row)


def delete_some_rows(connection: Connection, job_key: int, limit: int) -> bool:
    """Removes groups, then instances, that a start has written; returns whether any were left."""
    groups = "DELETE FROM groups WHERE key IN (SELECT key FROM groups WHERE job_key = ? LIMIT ?)"
    instances = (
        "DELETE FROM instances WHERE job_key = ? AND position IN "
        "(SELECT position FROM instances WHERE job_key = ? LIMIT ?)"
    )
    if connection.execute(groups, (job_key, limit)).rowcount:
        return True
    return connection.execute(instances, (job_key, job_key, limit)).rowcount > 0


def _as_start(row: sqlite3.Row) -> StartRecord:
    return StartRecord(**{name: row[name] for name in row.keys()})  # noqa: SIM118 - iterating a Row gives values, not names
