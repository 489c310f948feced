"""Rows of ``trajectories`` and ``members``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_plugins.rollout_buffer.rules.groups import Member
from slime_plugins.rollout_buffer.storage.tables.connection import Connection


def insert_trajectory(connection: Connection, **columns: Any) -> None:
    names = ", ".join(columns)
    marks = ", ".join(f":{name}" for name in columns)
    portion = "(SELECT portion FROM jobs WHERE key = :job_key)"
    connection.execute(f"INSERT INTO trajectories ({names}, portion) VALUES ({marks}, {portion})", columns)


def has_trajectory(connection: Connection, job_key: int, uid: str) -> bool:
    """Returns True if the job has a trajectory of that uid."""
    query = "SELECT 1 FROM trajectories WHERE job_key = ? AND uid = ?"
    return connection.execute(query, (job_key, uid)).fetchone() is not None


def count_trajectories(connection: Connection, job_key: int) -> int:
    """Counts the trajectories of a job."""
    return int(connection.execute("SELECT count(*) FROM trajectories WHERE job_key = ?", (job_key,)).fetchone()[0])


def count_members(connection: Connection, group_key: int) -> int:
    """Counts the trajectories of a group that are not late."""
    query = "SELECT count(*) FROM trajectories WHERE group_key = ? AND late = 0"
    return int(connection.execute(query, (group_key,)).fetchone()[0])


def members_of(connection: Connection, group_key: int) -> list[Member]:
    """Returns the trajectories of a group as members, in slot order. Each is its own source."""
    query = (
        "SELECT uid, instance_id, slot, reward, raw_reward, uid AS source_uid FROM trajectories "
        "WHERE group_key = ? AND late = 0 ORDER BY slot, key"
    )
    return [Member(**dict(row)) for row in connection.execute(query, (group_key,))]


def insert_members(connection: Connection, group_key: int, members: Sequence[Member]) -> None:
    """Adds the members that a group is delivered with: each delivery of the group reads these rows."""
    rows = (
        (group_key, ordinal, m.uid, None if m.remove_sample else m.source_uid, m.reward, m.raw_reward, m.remove_sample)
        for ordinal, m in enumerate(members)
    )
    connection.executemany(
        "INSERT INTO members (group_key, ordinal, uid, source_uid, reward, raw_reward, remove_sample) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def count_outcomes(connection: Connection, job_key: int) -> dict[str, int]:
    """Counts the trajectories of a job by outcome."""
    query = (
        "SELECT coalesce(sum(completed), 0) AS completed, coalesce(sum(truncated), 0) AS truncated, "
        "coalesce(sum(aborted), 0) AS aborted FROM trajectory_minutes WHERE job_key = ?"
    )
    return {name: count for name, count in dict(connection.execute(query, (job_key,)).fetchone()).items() if count}


def count_late(connection: Connection, job_key: int) -> int:
    """Counts trajectories written after their group had closed."""
    query = "SELECT count(*) FROM trajectories INDEXED BY trajectories_late WHERE job_key = ? AND late = 1"
    return int(connection.execute(query, (job_key,)).fetchone()[0])
