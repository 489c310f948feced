"""Queries on staleness: stale ready groups, the trainer's pace, and the weight versions of the newest episodes."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.rules.stuck_weights import SampledEpisode
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

MAX_DELIVERIES = 256
"""Number of the newest deliveries that show the trainer's pace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedDelivery:
    """A delivery with the times that show the trainer's pace."""

    delivered_at: float
    waited_s: float
    """How long the trainer's poll waited for it."""
    version: int
    """The weight version that the poll reported."""
    group_count: int


def newest_deliveries(connection: Connection, job_key: int, since: float) -> list[TimedDelivery]:
    """Returns a job's newest deliveries that were made since a time and have not expired, oldest first.

    Deliveries to a poll that reported no weight version are left out.
    """
    query = (
        "SELECT created_at, coalesce(waited_s, 0.0), json_extract(meta_info, '$.weight_version'), "
        "(SELECT count(*) FROM delivery_groups WHERE delivery_key = deliveries.key) FROM deliveries "
        "WHERE job_key = ? AND created_at >= ? AND state != 'expired' ORDER BY created_at DESC LIMIT ?"
    )
    newest_first = connection.execute(query, (job_key, since, MAX_DELIVERIES)).fetchall()
    return [
        TimedDelivery(delivered_at=delivered_at, waited_s=waited_s, version=int(version), group_count=count)
        for delivered_at, waited_s, version, count in reversed(newest_first)
        if version is not None
    ]


def oldest_running_since(connection: Connection, job_key: int) -> float | None:
    """Returns when the oldest group with a running attempt was opened; None if no attempt is running."""
    query = (
        "SELECT min(opened_at) FROM groups WHERE job_key = ? AND state = 'open' AND opened_at IS NOT NULL "
        "AND EXISTS (SELECT 1 FROM attempts WHERE group_key = groups.key AND attempts.state = 'running')"
    )
    opened_at = connection.execute(query, (job_key,)).fetchone()[0]
    return None if opened_at is None else float(opened_at)


def newest_episodes(connection: Connection, job_key: int, trainer_run: int, limit: int) -> list[SampledEpisode]:
    """Returns those of the newest ``limit`` trajectories that are of this run of the trainer, with start times."""
    query = (
        "SELECT group_key, oldest_version, started_at FROM (SELECT group_key, slot, attempt, oldest_version, "
        "trainer_run FROM trajectories INDEXED BY trajectories_to_look_at WHERE job_key = ? ORDER BY key DESC LIMIT ?) "
        "LEFT JOIN attempts USING (group_key, slot, attempt) WHERE trainer_run = ?"
    )
    return [
        SampledEpisode(group_key=group_key, began_at=began_at, oldest_version=version)
        for group_key, version, began_at in connection.execute(query, (job_key, limit, trainer_run))
    ]


def stale_ready_groups(
    connection: Connection, job_key: int, trainer_run: int, oldest_allowed: int, *, version_of_earlier_runs: int
) -> list[int]:
    """Returns the keys of ready groups with a member sampled by older weights than ``oldest_allowed``.

    ``oldest_allowed`` is a version of ``trainer_run``. A member of another run counts as sampled by
    ``version_of_earlier_runs``.
    """
    query = (
        "SELECT groups.key FROM groups JOIN trajectories ON group_key = groups.key AND late = 0 "
        "WHERE groups.job_key = ? AND groups.state = 'ready' AND oldest_version IS NOT NULL GROUP BY groups.key "
        "HAVING min(CASE WHEN trainer_run = ? THEN oldest_version ELSE ? END) < ?"
    )
    rows = connection.execute(query, (job_key, trainer_run, version_of_earlier_runs, oldest_allowed))
    return [int(row[0]) for row in rows]
