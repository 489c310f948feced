"""Rows of ``turns``: what was sampled in open gateway sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def insert_turn(connection: Connection, group_key: int, slot: int, attempt: int, columns: Mapping[str, Any]) -> bool:
    """Adds a turn; returns False if the attempt has a turn of that number."""
    row = {"group_key": group_key, "slot": slot, "attempt": attempt, **columns}
    query = (
        f"INSERT INTO turns ({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)}) ON CONFLICT DO NOTHING"
    )
    return connection.execute(query, row).rowcount == 1


def turns_of(connection: Connection, group_key: int, slot: int, attempt: int) -> list[dict[str, Any]]:
    """Returns the turns of an attempt by number, with all columns."""
    query = "SELECT * FROM turns WHERE group_key = ? AND slot = ? AND attempt = ? ORDER BY number"
    return [dict(row) for row in connection.execute(query, (group_key, slot, attempt))]


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
