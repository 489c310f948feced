"""Rows of ``services``: which processes live."""

from __future__ import annotations

import json
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def beat(connection: Connection, name: str, pid: int, now: float, detail: dict[str, Any]) -> None:
    """Says that a process lives."""
    connection.execute(
        "INSERT INTO services (name, pid, heartbeat_at, detail) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "pid = excluded.pid, heartbeat_at = excluded.heartbeat_at, detail = excluded.detail",
        (name, pid, now, json.dumps(detail)),
    )


def heartbeat(connection: Connection, name: str) -> tuple[float, dict[str, Any]] | None:
    """Returns when a process last said that it lives, and what it said."""
    row = connection.execute("SELECT heartbeat_at, detail FROM services WHERE name = ?", (name,)).fetchone()
    return None if row is None else (float(row[0]), json.loads(row[1]))


def remove(connection: Connection, name: str) -> None:
    """Removes a process that ended in order."""
    connection.execute("DELETE FROM services WHERE name = ?", (name,))


def heartbeats(connection: Connection, prefix: str) -> list[tuple[float, dict[str, Any]]]:
    """Returns when all processes whose names begin so last said that they live, and what they said."""
    query = "SELECT heartbeat_at, detail FROM services WHERE substr(name, 1, ?) = ? ORDER BY name"
    return [(float(row[0]), json.loads(row[1])) for row in connection.execute(query, (len(prefix), prefix))]


def remove_before(connection: Connection, prefix: str, moment: float) -> None:
    """Removes processes whose names begin so and that have said nothing since then."""
    connection.execute(
        "DELETE FROM services WHERE substr(name, 1, ?) = ? AND heartbeat_at < ?", (len(prefix), prefix, moment)
    )
