"""Moves stored times by a jump of the wall clock, and records the newest jumps as rows of ``clock_jumps``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.storage.tables.connection import Connection

_MOVE_TIMES = (
    "UPDATE deliveries SET lease_expires_at = lease_expires_at + :s WHERE state = 'leased'",
    "UPDATE groups SET opened_at = opened_at + :s, last_write_at = last_write_at + :s WHERE state = 'open' "
    "AND opened_at IS NOT NULL AND job_key IN (SELECT key FROM jobs WHERE state IN ('running', 'paused'))",
    "UPDATE attempts SET started_at = started_at + :s, used_at = used_at + :s WHERE state = 'running'",
    "UPDATE jobs SET last_poll_at = last_poll_at + :s, waiting_since = waiting_since + :s, "
    "updated_at = updated_at + :s WHERE state IN ('running', 'paused')",
    "UPDATE rollouts SET expires_at = expires_at + :s",
    "UPDATE services SET heartbeat_at = heartbeat_at + :s",
)
KEPT_JUMPS = 1000
"""Number of the newest jumps that stay recorded."""


def move_times(connection: Connection, jump_s: float, now: float) -> None:
    """Moves the stored times of leases, timeouts and heartbeats by a jump of the clock, and records the jump."""
    for statement in _MOVE_TIMES:
        connection.execute(statement, {"s": jump_s})
    connection.execute("INSERT INTO clock_jumps (at, seconds) VALUES (?, ?)", (now, jump_s))
    connection.execute("DELETE FROM clock_jumps WHERE key <= (SELECT max(key) FROM clock_jumps) - ?", (KEPT_JUMPS,))


def time_of_age(connection: Connection, now: float, age_s: float) -> float:
    """Returns the time to compare with stored times: rows with an earlier one are older than ``age_s``.

    A row written before the clock was set forward looks older than it is; the returned time allows for these jumps.
    """
    query = "SELECT coalesce(sum(seconds), 0.0) FROM clock_jumps WHERE at >= ? AND seconds > 0"
    jumped_s = 0.0
    while (sum_s := connection.execute(query, (now - age_s - jumped_s,)).fetchone()[0]) > jumped_s:
        jumped_s = sum_s  # the window begins earlier now, and may contain further jumps
    return now - age_s - jumped_s
