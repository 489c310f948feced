"""Rows of ``turns`` (of open gateway sessions), and of ``rollouts`` and ``rollout_turns`` (of remote rollouts)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.attempt_rows import ATTEMPT_KEY
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

_OF_CLOSED_GROUP_BEFORE = "created_at < ? AND group_key IN (SELECT key FROM groups WHERE state <> 'open')"
"""In SQL: the turns that retention purges."""


def insert_turns(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Adds turns, whose rows have the same columns; returns for each whether it was added.

    A turn is refused if its attempt or group is closed, or the attempt has a turn of that number. Usually no
    turn is refused, so one statement adds them all: each further statement would release the GIL once more.
    """
    # NULL, which the column refuses, if the attempt or the group is closed.
    number = (
        "CASE WHEN EXISTS (SELECT 1 FROM attempts JOIN groups ON groups.key = group_key WHERE group_key = ? "
        "AND slot = ? AND attempt = ? AND attempts.state = 'running' AND groups.state = 'open') THEN ? END"
    )
    if not rows:
        return []
    marks = ", ".join(number if name == "number" else "?" for name in rows[0])
    values: list[Any] = []
    for row in rows:
        for name, value in row.items():
            values += [row["group_key"], row["slot"], row["attempt"], value] if name == "number" else [value]
    query = f"INSERT INTO turns ({', '.join(rows[0])}) VALUES {', '.join(f'({marks})' for _ in rows)}"
    try:
        connection.execute(query, values)
    except sqlite3.IntegrityError:  # nothing was added
        return [False] if len(rows) == 1 else [insert_turns(connection, [row])[0] for row in rows]
    return [True] * len(rows)


def turns_of(connection: Connection, key: Mapping[str, int], *, after: int = 0) -> list[dict[str, Any]]:
    """Returns the turns of an attempt with higher numbers than ``after``, by number, with all columns."""
    query = f"SELECT * FROM turns WHERE {ATTEMPT_KEY} AND number > :after ORDER BY number"
    return [dict(row) for row in connection.execute(query, {**key, "after": after})]


def set_sent(connection: Connection, key: Mapping[str, int], number: int, *, sent: bool) -> None:
    """Stores whether the answer of a turn reached its client; an answer that reached it once stays marked."""
    query = f"UPDATE turns SET sent = max(coalesce(sent, 0), :sent) WHERE {ATTEMPT_KEY} AND number = :number"
    connection.execute(query, {**key, "number": number, "sent": sent})


def sent_flags(connection: Connection, key: Mapping[str, int]) -> dict[int, bool]:
    """Returns, by turn number, whether the answer reached its client; turns without this information are left out."""
    query = f"SELECT number, sent FROM turns WHERE {ATTEMPT_KEY} AND sent IS NOT NULL"
    return {number: bool(sent) for number, sent in connection.execute(query, key)}


def count_turns(connection: Connection, group_key: int, slot: int, attempt: int) -> int:
    query = "SELECT count(*) FROM turns WHERE group_key = ? AND slot = ? AND attempt = ?"
    return int(connection.execute(query, (group_key, slot, attempt)).fetchone()[0])


def purge_turns(connection: Connection, before: float) -> int:
    """Deletes the turns of closed groups that were added before a time; returns how many. No session continues them."""
    return connection.execute(f"DELETE FROM turns WHERE {_OF_CLOSED_GROUP_BEFORE}", (before,)).rowcount


def oldest_kept_turn(connection: Connection, before: float, default: float) -> float:
    """Returns when the oldest turn that ``purge_turns`` keeps was added; ``default`` if there is no such turn."""
    query = f"SELECT coalesce(min(created_at), ?) FROM turns WHERE NOT ({_OF_CLOSED_GROUP_BEFORE})"
    return float(connection.execute(query, (default, before)).fetchone()[0])


def insert_rollout(connection: Connection, row: Mapping[str, Any]) -> bool:
    """Adds an open rollout; returns False if there is one of its id."""
    query = (
        "INSERT OR IGNORE INTO rollouts (rollout_id, job_id, instance_id, expires_at, opening) "
        "VALUES (:rollout_id, :job_id, :instance_id, :expires_at, :opening)"
    )
    return connection.execute(query, row).rowcount == 1


def find_rollout(connection: Connection, rollout_id: str) -> dict[str, Any] | None:
    row = connection.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return None if row is None else dict(row)


def count_open_rollouts(connection: Connection, now: float) -> int:
    query = "SELECT count(*) FROM rollouts WHERE ending IS NULL AND expires_at > ?"
    return int(connection.execute(query, (now,)).fetchone()[0])


def rollout_ids(connection: Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT rollout_id FROM rollouts ORDER BY rowid")]


def insert_turn_of_rollout(connection: Connection, rollout_id: str, row: Mapping[str, Any], expires_at: float) -> bool:
    """Adds a turn; returns False if the rollout has one of its number, or has ended."""
    query = "UPDATE rollouts SET expires_at = ? WHERE rollout_id = ? AND ending IS NULL"
    if connection.execute(query, (expires_at, rollout_id)).rowcount == 0:
        return False
    names = ["rollout_id", *row]
    query = f"INSERT INTO rollout_turns ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)})"
    try:
        connection.execute(query, [rollout_id, *row.values()])
    except sqlite3.IntegrityError:
        return False
    return True


def turns_of_rollout(connection: Connection, rollout_id: str, *, after: int) -> list[dict[str, Any]]:
    """Returns the turns of a rollout with higher numbers than ``after``, by number, with all columns."""
    query = "SELECT * FROM rollout_turns WHERE rollout_id = ? AND number > ? ORDER BY number"
    return [dict(row) for row in connection.execute(query, (rollout_id, after))]


def end_rollout(connection: Connection, rollout_id: str, ending: bytes, expires_at: float) -> None:
    query = "UPDATE rollouts SET ending = ?, expires_at = ? WHERE rollout_id = ?"
    connection.execute(query, (ending, expires_at, rollout_id))


def instances_of_open_rollouts(connection: Connection, job_id: str, now: float) -> set[str | None]:
    """Returns the instances of a job's open rollouts; None for a rollout whose instance is not known."""
    query = "SELECT DISTINCT instance_id FROM rollouts WHERE job_id = ? AND ending IS NULL AND expires_at > ?"
    return {row[0] for row in connection.execute(query, (job_id, now))}


def purge_rollouts(connection: Connection, before: float) -> None:
    """Deletes the rollouts whose ``expires_at`` is before a time, with their turns."""
    connection.execute("DELETE FROM rollouts WHERE expires_at < ?", (before,))
