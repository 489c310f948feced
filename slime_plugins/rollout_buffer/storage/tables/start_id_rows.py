"""Rows of ``start_ids``: the ids of accepted starts, so that a repeated request is recognized."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record

MAX_START_IDS = 1000
"""Number of a job's newest start ids that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartIdRecord:
    """An accepted start of a job; ``identity`` is the digest of its payload."""

    key: int
    job_key: int
    job_id: str
    start_id: str
    identity: str


def insert_start_id(connection: Connection, job_key: int, job_id: str, start_id: str, identity: str) -> None:
    """Adds the id of a start, and deletes the oldest beyond ``MAX_START_IDS``."""
    query = "INSERT INTO start_ids (job_key, job_id, start_id, identity) VALUES (?, ?, ?, ?)"
    connection.execute(query, (job_key, job_id, start_id, identity))
    connection.execute(
        "DELETE FROM start_ids WHERE job_key = ? AND key <= "
        "(SELECT key FROM start_ids WHERE job_key = ? ORDER BY key DESC LIMIT 1 OFFSET ?)",
        (job_key, job_key, MAX_START_IDS),
    )


def find_start_id(connection: Connection, start_id: str, identity: str, job_id: str | None) -> StartIdRecord | None:
    """Returns the newest start with that id and payload: of any job if ``job_id`` is None (the payload names none)."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM start_ids WHERE start_id = ? AND identity = ? AND job_id = coalesce(?, job_id) "
        "ORDER BY key DESC LIMIT 1",
        (start_id, identity, job_id),
    ).fetchone()
    return None if row is None else as_record(StartIdRecord, row)
