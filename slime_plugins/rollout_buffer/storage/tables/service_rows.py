"""Rows of ``services``: heartbeats of processes."""

from __future__ import annotations

import json
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def beat(connection: Connection, name: str, pid: int, now: float, detail: dict[str, Any]) -> None:
    """Stores a heartbeat with its report, in place of the last one of that name."""
    connection.execute(
        "INSERT INTO services (name, pid, heartbeat_at, detail) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "pid = excluded.pid, heartbeat_at = excluded.heartbeat_at, detail = excluded.detail",
        (name, pid, now, json.dumps(detail)),
    )


def heartbeat(connection: Connection, name: str) -> tuple[float, dict[str, Any]] | None:
    """Returns (time, detail) of a service's last heartbeat."""
    row = connection.execute("SELECT heartbeat_at, detail FROM services WHERE name = ?", (name,)).fetchone()
    return None if row is None else (float(row[0]), json.loads(row[1]))


def remove(connection: Connection, name: str) -> None:
    """Removes a service that was stopped."""
    connection.execute("DELETE FROM services WHERE name = ?", (name,))


def heartbeats(connection: Connection, prefix: str) -> list[tuple[float, dict[str, Any]]]:
    """Returns (time, detail) of the last heartbeats of all services with a name prefix."""
    query = "SELECT heartbeat_at, detail FROM services WHERE substr(name, 1, ?) = ? ORDER BY name"
    return [(float(row[0]), json.loads(row[1])) for row in connection.execute(query, (len(prefix), prefix))]


def remove_before(connection: Connection, prefix: str, moment: float) -> None:
    """Removes the services with a name prefix that have sent no heartbeat since a time."""
    connection.execute(
        "DELETE FROM services WHERE substr(name, 1, ?) = ? AND heartbeat_at < ?", (len(prefix), prefix, moment)
    )
