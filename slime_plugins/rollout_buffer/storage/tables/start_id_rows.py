"""Rows of ``start_ids``: which start a job was begun or attached to by, so that one that is sent again is the same."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from slime_plugins.rollout_buffer.storage.tables.connection import Connection

MAX_START_IDS = 1000
"""Of each job so many are kept, the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartIdRecord:
    """A row of ``start_ids``."""

    key: int
    job_key: int
    job_id: str
    start_id: str
    identity: str


def insert_start_id(connection: Connection, job_key: int, job_id: str, start_id: str, identity: str) -> None:
    """Keeps the id of a start, and forgets the oldest of those beyond ``MAX_START_IDS``."""
    query = "INSERT INTO start_ids (job_key, job_id, start_id, identity) VALUES (?, ?, ?, ?)"
    connection.execute(query, (job_key, job_id, start_id, identity))
    connection.execute(
        "DELETE FROM start_ids WHERE job_key = ? AND key <= "
        "(SELECT key FROM start_ids WHERE job_key = ? ORDER BY key DESC LIMIT 1 OFFSET ?)",
        (job_key, job_key, MAX_START_IDS),
    )


def find_start_id(connection: Connection, start_id: str, identity: str, job_id: str | None) -> StartIdRecord | None:
    """Returns the newest start of that id by the same payload; ``job_id`` is None where the payload names no job."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM start_ids WHERE start_id = ? AND identity = ? AND job_id = coalesce(?, job_id) "
        "ORDER BY key DESC LIMIT 1",
        (start_id, identity, job_id),
    ).fetchone()
    if row is None:
        return None
    return StartIdRecord(**{name: row[name] for name in row.keys()})  # noqa: SIM118 - iterating a Row gives values, not names
