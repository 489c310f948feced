"""Rows of ``turns``: what was sampled in open gateway sessions."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.attempt_rows import PLACE
from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def insert_turns(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Adds turns, one row of the same columns each; returns which were added.

    A turn is refused if its attempt or group is closed, or the attempt has a turn of that number. Usually none is, and
    one statement adds all: a thread gives the interpreter lock away at each.
    """
    # NULL, which the column refuses, if the attempt or the group is closed.
    number = (
        "CASE WHEN EXISTS (SELECT 1 FROM attempts JOIN groups ON groups.key = group_key WHERE group_key = ? "
        "AND slot = ? AND attempt = ? AND attempts.state = 'running' AND groups.state = 'open') THEN ? END"
    )
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


def turns_of(connection: Connection, place: Mapping[str, int], *, after: int = 0) -> list[dict[str, Any]]:
    """Returns the turns of an attempt with higher numbers than ``after``, by number, with all columns."""
    query = f"SELECT * FROM turns WHERE {PLACE} AND number > :after ORDER BY number"
    return [dict(row) for row in connection.execute(query, {**place, "after": after})]


def set_sent(connection: Connection, place: Mapping[str, int], number: int, *, sent: bool) -> None:
    """Stores whether the answer of a turn reached its client; once one has, that stays."""
    query = f"UPDATE turns SET sent = max(coalesce(sent, 0), :sent) WHERE {PLACE} AND number = :number"
    connection.execute(query, {**place, "number": number, "sent": sent})


def sent_flags(connection: Connection, place: Mapping[str, int]) -> dict[int, bool]:
    """Returns by number whether answers reached their clients, of the turns for which this was stored."""
    query = f"SELECT number, sent FROM turns WHERE {PLACE} AND sent IS NOT NULL"
    return {number: bool(sent) for number, sent in connection.execute(query, place)}


def count_turns(connection: Connection, group_key: int, slot: int, attempt: int) -> int:
    query = "SELECT count(*) FROM turns WHERE group_key = ? AND slot = ? AND attempt = ?"
    return int(connection.execute(query, (group_key, slot, attempt)).fetchone()[0])


def purge_turns(connection: Connection, before: float) -> int:
    """Deletes turns older than a time whose group is closed: no session can continue them; returns their number."""
    query = "DELETE FROM turns WHERE created_at < ? AND group_key IN (SELECT key FROM groups WHERE state <> 'open')"
    return connection.execute(query, (before,)).rowcount


def oldest_turn(connection: Connection, default: float) -> float:
    """Returns when the oldest turn was added."""
    found = connection.execute("SELECT min(created_at) FROM turns").fetchone()[0]
    return default if found is None else float(found)
