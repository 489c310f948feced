"""Looking, and nothing else: past deliveries, trajectories, and the counts that ``/metrics`` shows. Changes no state.

Every answer is one read transaction, hence one consistent moment. Lists are paged by the row's key, newest first: a
cursor stays right while new rows come in.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.errors import ConflictError, DamagedError, NotFoundError
from slime_plugins.rollout_buffer.protocol.query_params import PageQuery, TrajectoryPageQuery
from slime_plugins.rollout_buffer.reporting.time_series import job_measures
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    content_rows,
    delivery_rows,
    group_rows,
    job_rows,
    service_rows,
    trajectory_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import AttemptState, GroupState

__all__ = ["CONTAINS", "Inspection", "JobCounts", "StoreCounts", "StoredTrajectory", "find_job", "like_pattern"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTrajectory:
    """One trajectory as it is kept: what the buffer knows of it, as JSON keys, and its payload, as JSON."""

    light: dict[str, Any]
    body: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCounts:
    """What is counted of one job at one moment."""

    job_id: str
    task_type: str
    state: str
    group_size: int
    groups: dict[str, int]
    causes: dict[tuple[str, str], int]
    """(state, cause) of groups that were filtered or failed."""
    attempts: dict[tuple[AttemptState, str], int]
    """(state, error code); the code is empty for attempts without an error."""
    outcomes: dict[str, int]
    late: int
    damaged: int
    measures: dict[str, dict[str, float]]
    """By what was measured and statistic, as ``time_series.job_measures``."""
    deliveries: dict[str, int]
    poll_age_s: float | None
    """Seconds since a trainer last asked; None when none ever did."""
    oldest_ready_age_s: float
    """Seconds that the longest waiting ready group has waited; 0 when none waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """What ``/metrics`` shows, from one moment."""

    jobs: list[JobCounts]
    supervisor_age_s: float | None
    """Seconds since the supervisor's heartbeat; None when there never was one, or it ended in order."""


class Inspection:
    """Read-only views of a store. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] | None = None) -> None:
        """``clock`` gives seconds since the epoch; without one, the store's."""
        self.store = store
        self._clock = clock or store.clock

    # --- deliveries --------------------------------------------------------------------------------------------------

    def delivery(self, delivery_id: str) -> Delivery:
        """Returns a past delivery, to be read again with ``Buffer.delivered_items``.

        Raises:
            NotFoundError: there is none of that id.
        """
        with self.store.read() as connection:
            found = delivery_rows.find_delivery(connection, delivery_id)
        if found is None:
            raise NotFoundError(f"there is no delivery {delivery_id[:300]!r}; GET /jobs/<job_id>/deliveries lists them")
        return Delivery(key=found.key, delivery_id=found.delivery_id, meta_info=found.meta_info)

    def deliveries(self, job_id: str, page: PageQuery) -> dict[str, Any]:
        """Returns one page of a job's deliveries, newest first.

        Raises:
            NotFoundError: there is no such job.
        """
        query = (
            "SELECT key, delivery_id, state, consumer_id, poll_id, created_at, lease_expires_at, "
            "(SELECT count(*) FROM delivery_groups WHERE delivery_key = deliveries.key) AS groups, "
            "(SELECT count(*) FROM delivery_groups JOIN members USING (group_key) WHERE delivery_key = deliveries.key) "
            "AS samples FROM deliveries WHERE job_key = ? AND key < ? ORDER BY key DESC LIMIT ?"
        )
        with self.store.read() as connection:
            job = find_job(connection, job_id)
            rows = connection.execute(query, (job.key, _before(page), page.limit + 1)).fetchall()
        return {
            "job_id": job.job_id,
            "deliveries": [_without_key(row) for row in rows[: page.limit]],
            **_next(rows, page),
        }

    # --- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(self, page: TrajectoryPageQuery) -> dict[str, Any]:
        """Returns one page of trajectories without their payloads, newest first.

        Raises:
            NotFoundError: the job that is asked for does not exist.
        """
        with self.store.read() as connection:
            conditions, values = _conditions(connection, page)
            # The index holds every filter: rows, which lie among payloads, are read only for what is shown.
            found = f"SELECT key FROM trajectories INDEXED BY {_BY_ORDER} WHERE {' AND '.join(conditions)}"
            query = f"{_LIGHT} WHERE trajectories.key IN ({found} ORDER BY key DESC LIMIT ?) {_NEWEST_FIRST}"
            rows = connection.execute(query, (*values, page.limit + 1)).fetchall()
        return {"trajectories": [_light(row) for row in rows[: page.limit]], **_next(rows, page)}

    def trajectory(self, uid: str, job_id: str | None) -> StoredTrajectory:
        """Returns the trajectory of that uid.

        Raises:
            NotFoundError: there is none, or no such job, or its payload is damaged.
            ConflictError: several jobs have one of that uid and none was named.
        """
        with self.store.read() as connection:
            # Through the jobs, because uids are indexed within a job.
            keys = [find_job(connection, job_id).key] if job_id is not None else _job_keys(connection)
            marks = ", ".join("?" for _ in keys)
            query = f"{_LIGHT} WHERE trajectories.job_key IN ({marks}) AND trajectories.uid = ?"
            rows = connection.execute(query, (*keys, uid)).fetchall()
            place = trajectory_rows.body_of(connection, rows[0]["job_key"], uid) if len(rows) == 1 else (None, None)
        if not rows:
            raise NotFoundError(f"there is no trajectory {uid[:300]!r}; GET /trajectories lists them")
        if len(rows) > 1:
            names = [row["job_id"] for row in rows]
            raise ConflictError(
                f"{len(rows)} jobs have a trajectory {uid!r}: name one with job_id ({', '.join(names[:10])})",
                {"job_ids": names[:100]},
            )
        try:
            return StoredTrajectory(light=_light(rows[0]), body=self.store.get_payload(*place))
        except DamagedError as error:
            raise NotFoundError(f"the payload of trajectory {uid!r} is damaged: {error.message}") from error

    # --- counting ----------------------------------------------------------------------------------------------------

    def counts(self, supervisor: str) -> StoreCounts:
        """Counts everything that ``/metrics`` shows; ``supervisor`` is the name its heartbeat is stored under."""
        now = self._clock()
        with self.store.read() as connection:
            jobs = [_count(connection, job, now) for job in job_rows.all_jobs(connection)]
            beat = service_rows.heartbeat(connection, supervisor)
        return StoreCounts(jobs=jobs, supervisor_age_s=None if beat is None else max(0.0, now - beat[0]))


_COLUMNS = (
    "SELECT trajectories.key AS key, trajectories.job_key, jobs.job_id, uid, trajectories.instance_id, groups.epoch, "
    "slot, attempt, outcome, "
    "stop_reason, reward, raw_reward, late, groups.state AS group_state, groups.key AS group_index, "
    "deliveries.delivery_id, body_bytes, trajectories.created_at, success, turns, sampled_tokens, generate_s, "
    "played_s, oldest_version, versions_behind"
)
_TABLES = (
    " FROM trajectories JOIN jobs ON jobs.key = trajectories.job_key "
    "LEFT JOIN groups ON groups.key = trajectories.group_key "
    "LEFT JOIN deliveries ON deliveries.key = groups.delivery_key"
)
_LIGHT = _COLUMNS + _TABLES
_BY_ORDER = "trajectories_to_look_at"
_NEWEST_FIRST = "ORDER BY trajectories.key DESC"


def _light(row: sqlite3.Row) -> dict[str, Any]:
    light = {name: row[name] for name in row.keys() if name not in ("key", "job_key")}  # noqa: SIM118 - iterating a Row gives values, not names
    return {**light, "late": bool(light["late"])}


def _without_key(row: sqlite3.Row) -> dict[str, Any]:
    return {name: row[name] for name in row.keys() if name != "key"}  # noqa: SIM118 - iterating a Row gives values, not names


def _conditions(connection: Connection, page: TrajectoryPageQuery) -> tuple[list[str], list[Any]]:
    conditions: list[str] = ["key < ?"]
    values: list[Any] = [_before(page)]
    if page.job_id is not None:
        conditions.append("job_key = ?")
        values.append(find_job(connection, page.job_id).key)
    if page.search is not None:
        conditions.append(f"({CONTAINS.format('instance_id')} OR {CONTAINS.format('uid')})")
        values += [like_pattern(page.search)] * 2
    if page.success is not None:
        conditions.append("success >= 1" if page.success else "success < 1")
    filters = {
        "instance_id = ?": page.instance_id,
        "outcome = ?": page.outcome,
        "stop_reason = ?": page.stop_reason,
        "reward >= ?": page.min_reward,
        "reward <= ?": page.max_reward,
        "oldest_version >= ?": page.min_version,
        "oldest_version <= ?": page.max_version,
    }
    given = {condition: value for condition, value in filters.items() if value is not None}
    return [*conditions, *given], [*values, *given.values()]


CONTAINS = "{} LIKE ? ESCAPE '\\'"
"""The condition that a column contains a text; its value is made by ``like_pattern``."""


def like_pattern(text: str) -> str:
    """Returns what finds the text itself anywhere: its percent signs and underscores stand for themselves."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _before(page: PageQuery) -> int:
    return 2**63 - 1 if page.cursor is None else page.cursor


def _next(rows: Sequence[sqlite3.Row], page: PageQuery) -> dict[str, Any]:
    return {"next_cursor": rows[page.limit - 1]["key"] if len(rows) > page.limit else None}


def find_job(connection: Connection, job_id: str) -> JobRecord:
    job = job_rows.find_job(connection, job_id)
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:300]!r}; GET /jobs lists them")
    return job


def _job_keys(connection: Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT key FROM jobs")]


def _count(connection: Connection, job: JobRecord, now: float) -> JobCounts:
    oldest = connection.execute(
        "SELECT min(closed_at) FROM groups WHERE job_key = ? AND state = 'ready'", (job.key,)
    ).fetchone()[0]
    return JobCounts(
        job_id=job.job_id,
        task_type=job.task_type,
        state=job.state.value,
        group_size=job.group_size,
        groups={state.value: count for state, count in group_rows.count_groups(connection, job.key).items()},
        causes=_count_pairs(connection, _CAUSES, job),
        attempts=attempt_rows.attempts_by_error(connection, job.key),
        outcomes=trajectory_rows.count_outcomes(connection, job.key),
        late=trajectory_rows.count_late(connection, job.key),
        damaged=content_rows.count_damaged(connection, job.key),
        measures=job_measures(connection, job.key),
        deliveries=_count_deliveries(connection, job),
        poll_age_s=None if job.last_poll_at is None else max(0.0, now - job.last_poll_at),
        oldest_ready_age_s=0.0 if oldest is None else max(0.0, now - oldest),
    )


_CAUSES = (
    f"SELECT state, cause, count(*) FROM groups WHERE job_key = ? AND state IN ('{GroupState.FILTERED.value}', "
    f"'{GroupState.FAILED.value}') GROUP BY state, cause"
)


def _count_pairs(connection: Connection, query: str, job: JobRecord) -> dict[tuple[str, str], int]:
    return {(row[0], row[1]): row[2] for row in connection.execute(query, (job.key,))}


def _count_deliveries(connection: Connection, job: JobRecord) -> dict[str, int]:
    query = "SELECT state, count(*) FROM deliveries WHERE job_key = ? GROUP BY state"
    return {row[0]: row[1] for row in connection.execute(query, (job.key,))}
