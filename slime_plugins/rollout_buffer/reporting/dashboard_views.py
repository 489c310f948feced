"""Read-only queries of the dashboard: overview, explanations, charts, groups with their members.

Lists are paged by a cursor, and each query uses an index. The time of a page does not grow with the number of
trajectories, unless groups are sorted by mean reward or filtered by a text.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

from slime_plugins.rollout_buffer.errors import NotFoundError
from slime_plugins.rollout_buffer.reporting.diagnosis import explain_group, explain_job, explain_service
from slime_plugins.rollout_buffer.reporting.inspection import CONTAINS, LOWEST, like_pattern
from slime_plugins.rollout_buffer.reporting.job_description import job_progress
from slime_plugins.rollout_buffer.reporting.job_snapshot import take_snapshot
from slime_plugins.rollout_buffer.reporting.time_series import (
    SUMMED_S,
    is_crowded,
    job_series,
    last_delivery_at,
    span_of,
)
from slime_plugins.rollout_buffer.rules.causes import Cause, CauseCode
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.state.group_opening import instance_of
from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.state.runner_reports import concurrency_of
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, job_rows, service_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import EngineReport, GroupState
from slime_plugins.rollout_buffer.wire.group_replies import (
    DeliveredGroupMember,
    Group,
    GroupAttempt,
    GroupEntry,
    GroupPage,
)
from slime_plugins.rollout_buffer.wire.job_replies import JobExplanation, Overview, OverviewJob, Series
from slime_plugins.rollout_buffer.wire.query_params import GroupPageQuery, OverviewQuery, SeriesQuery
from slime_plugins.rollout_buffer.wire.trajectory_replies import GroupMember

NEWEST_TRAJECTORIES = 200
MAX_ATTEMPTS_SHOWN = 1000


class Views:
    """Read-only queries of the dashboard. Thread-safe."""

    def __init__(self, store: Store, supervisor: str, *, clock: Callable[[], float] | None = None) -> None:
        """``supervisor`` is the name of the supervisor's heartbeat in the store; ``clock`` returns seconds since the
        epoch."""
        self.store = store
        self._supervisor = supervisor
        self._clock = clock or store.clock

    # --- jobs --------------------------------------------------------------------------------------------------------

    def overview(self, page: OverviewQuery, *, needs_token: bool = False) -> Overview:
        """Returns the state of the buffer and a page of jobs with their accounting, newest first."""
        now = self._clock()
        with self.store.read() as connection:
            beat = service_rows.heartbeat(connection, self._supervisor)
            jobs = _jobs_before(connection, page)
            entries = [self._job_entry(connection, job, now) for job in jobs[: page.limit]]
        age_s, detail = (None, {}) if beat is None else (abs(now - beat[0]), beat[1])
        explanation = explain_service(age_s, detail.get("broken_generators", {}))
        return Overview(
            now=now,
            supervisor_age_s=age_s,
            task_types=sorted(detail.get("task_types", {})),
            extensions=detail.get("extensions", []),
            disk_free_bytes=shutil.disk_usage(self.store.data_dir).free,
            explanation=explanation,
            jobs=entries,
            next_cursor=jobs[page.limit - 1].key if len(jobs) > page.limit else None,
            needs_token=needs_token,
        )

    def _job_entry(self, connection: Connection, job: JobRecord, now: float) -> OverviewJob:
        progress = job_progress(connection, job)
        return OverviewJob(
            **progress,
            newest=_newest(connection, job.key),
            explanation=explain_job(take_snapshot(connection, job, progress["groups"], now, self.store.data_dir)),
        )

    def explanation(self, job_id: str) -> JobExplanation:
        """Returns why a job does or does not progress, with the numbers behind it.

        Raises:
            NotFoundError: there is no such job.
        """
        now = self._clock()
        with self.store.read() as connection:
            job = find_job(connection, job_id)
            groups = {state.value: count for state, count in group_rows.count_groups(connection, job.key).items()}
            snapshot = take_snapshot(connection, job, groups, now, self.store.data_dir)
            newest = _newest(connection, job.key)
            concurrency = concurrency_of(connection, job, now)
        return JobExplanation(
            job_id=job.job_id,
            now=now,
            explanation=explain_job(snapshot),
            weight_version=job.weight_version,
            trainer_run=job.trainer_run,
            running_attempts=snapshot.running_attempts,
            trajectory_age_s=snapshot.trajectory_age_s,
            poll_age_s=snapshot.poll_age_s,
            trainer_waits_s=snapshot.trainer_waits_s,
            recent_failures=dict(snapshot.recent_failures),
            last_failure=snapshot.last_failure,
            devices=dict(snapshot.devices),
            engine={} if snapshot.engine == EngineReport() else asdict(snapshot.engine),
            concurrency=concurrency,
            newest=newest,
        )

    def series(self, job_id: str, query: SeriesQuery) -> Series:
        """Returns a job's history as columns with one entry per bucket.

        Raises:
            NotFoundError: there is no such job.
        """
        now = self._clock()
        with self.store.read() as connection:
            job = find_job(connection, job_id)
            last = now
            if job.finished_at is not None:
                # Groups of a finished job may still be delivered.
                delivered = last_delivery_at(connection, job.key) or 0.0
                last = min(now, max(job.finished_at, job.updated_at, delivered))
            first = job.created_at if query.range_s is None else max(job.created_at, last - query.range_s)
            span = span_of(first, last, width_s=query.width_s, since=query.since)
            if is_crowded(connection, job.key, span):
                span = span_of(first, last, width_s=SUMMED_S, since=query.since)
            columns = job_series(connection, job.key, span)
        return Series(job_id=job.job_id, until=last, width_s=span.width_s, columns=columns)

    # --- groups ------------------------------------------------------------------------------------------------------

    def groups(self, job_id: str, page: GroupPageQuery) -> GroupPage:
        """Returns a page of a job's groups with their members' rewards, most recently changed first unless sorted.

        Raises:
            NotFoundError: there is no such job.
        """
        with self.store.read() as connection:
            job = find_job(connection, job_id)
            conditions, values = _group_conditions(job.key, page)
            order = _GroupOrder(job.key, page)
            where = " AND ".join([*conditions, *order.after])
            query = f"{order.means}{_GROUP_ROWS}{order.joined} WHERE {where} {order.by} LIMIT ?"
            limit = page.limit + 1
            rows = connection.execute(query, (*order.before_values, *values, *order.values, limit)).fetchall()
            shown = rows[: page.limit]
            members = _members(connection, [row["key"] for row in shown])
        last = shown[-1] if len(rows) > page.limit else None
        return GroupPage(
            job_id=job.job_id,
            group_size=job.group_size,
            groups=[_group_entry(job, row, members.get(row["key"], [])) for row in shown],
            next_cursor=None if last is None else f"{last['touched']}:{last['key']}",
        )

    def group(self, group_index: int) -> Group:
        """Returns one group with its members, attempts and deliveries.

        Raises:
            NotFoundError: there is no such group.
        """
        with self.store.read() as connection:
            row = connection.execute(f"{_GROUP_ROWS} WHERE groups.key = ?", (group_index,)).fetchone()
            if row is None:
                raise NotFoundError(f"there is no group {group_index}; GET /jobs/<job_id>/groups lists them")
            job = job_rows.get_job(connection, row["job_key"])
            members = _members(connection, [group_index]).get(group_index, [])
            attempts = connection.execute(_ATTEMPTS, (group_index, MAX_ATTEMPTS_SHOWN)).fetchall()
            delivered = connection.execute(_DELIVERED, (group_index,)).fetchall()
            instance = instance_of(connection, group_rows.get_group(connection, group_index))
        return Group(
            **_group_entry(job, row, members),
            job_id=job.job_id,
            task_type=job.task_type,
            attempts=[cast("GroupAttempt", dict(attempt)) for attempt in attempts],
            delivered=[
                cast("DeliveredGroupMember", {**dict(row), "remove_sample": bool(row["remove_sample"])})
                for row in delivered
            ],
            instance=dict(instance.data),
        )


def _columns(reply: type) -> str:
    """Returns the columns of a query for a reply, whose keys are the names of the columns."""
    return ", ".join(reply.__annotations__)


_TOUCHED = "coalesce(closed_at, last_write_at, opened_at, 0.0)"
_GROUP_ROWS = (
    f"SELECT groups.key AS key, groups.job_key, epoch, position, instance_id, groups.state, cause, "
    f"cause_code, opened_at, last_write_at, closed_at, {_TOUCHED} AS touched, "
    "(SELECT delivery_id FROM deliveries WHERE deliveries.key = delivery_key) AS delivery_id FROM groups"
)
_ATTEMPTS = f"SELECT {_columns(GroupAttempt)} FROM attempts WHERE group_key = ? ORDER BY slot, attempt LIMIT ?"
_DELIVERED = f"SELECT {_columns(DeliveredGroupMember)} FROM members WHERE group_key = ? ORDER BY ordinal"


def _group_conditions(job_key: int, page: GroupPageQuery) -> tuple[list[str], list[Any]]:
    conditions: list[str] = ["groups.job_key = ?"]
    values: list[Any] = [job_key]
    if page.state is not None:
        conditions.append("groups.state = ?")
        values.append(page.state.value)
    for column, text in (("instance_id", page.search), ("cause", page.cause)):
        if text is not None:
            conditions.append(CONTAINS.format(column))
            values.append(like_pattern(text))
    return conditions, values


# One index has all columns that a mean needs, except `late`; another lists late trajectories. No table row is read.
_MEANS = (
    "WITH means AS (SELECT group_key, avg(reward) AS mean FROM trajectories INDEXED BY trajectories_by_portion "
    "WHERE job_key = ? AND group_key IS NOT NULL AND key NOT IN "
    "(SELECT key FROM trajectories INDEXED BY trajectories_late WHERE job_key = ? AND late = 1) GROUP BY group_key) "
)
_JOINED = " LEFT JOIN means ON means.group_key = groups.key"
_GROUP_COLUMNS = {"updated_at": _TOUCHED, "instance_id": "instance_id", "reward_mean": f"coalesce(mean, {LOWEST})"}


class _GroupOrder:
    """The order of a page of groups, as SQL: the condition of its cursor, and the ORDER BY.

    A cursor is the time of a group's last change, and its key. Only the default order uses that time; in it, a
    group that changes between two pages is on at least one of them.
    """

    def __init__(self, job_key: int, page: GroupPageQuery) -> None:
        column, by_mean = _GROUP_COLUMNS[page.sort], page.sort == "reward_mean"
        descending = page.order == "descending"
        self.means, self.joined = (_MEANS, _JOINED) if by_mean else ("", "")
        self.before_values: list[Any] = [job_key, job_key] if by_mean else []
        self.by = f"ORDER BY {column} {'DESC' if descending else 'ASC'}, groups.key {'ASC' if descending else 'DESC'}"
        self.after: list[str] = []
        self.values: list[Any] = []
        if page.cursor is None:
            return
        beyond, tie = ("<", ">") if descending else (">", "<")
        touched, key = page.cursor.split(":")
        of_group = f"(SELECT {column} FROM groups{self.joined} WHERE groups.key = ?)"
        last, value = ("?", float(touched)) if page.sort == "updated_at" else (of_group, int(key))
        self.after = [f"{column} {beyond}= {last}", f"({column} {beyond} {last} OR groups.key {tie} ?)"]
        self.values = [value, value, int(key)]


def _group_entry(job: JobRecord, row: sqlite3.Row, members: list[GroupMember]) -> GroupEntry:
    message = explain_group(GroupState(row["state"]), Cause(CauseCode(row["cause_code"]), row["cause"]))
    return GroupEntry(
        group_index=row["key"],
        epoch=row["epoch"],
        position=row["position"],
        instance_id=row["instance_id"],
        state=row["state"],
        cause=row["cause"],
        cause_code=row["cause_code"],
        message=message,
        group_size=job.group_size,
        opened_at=row["opened_at"],
        last_write_at=row["last_write_at"],
        closed_at=row["closed_at"],
        delivery_id=row["delivery_id"],
        members=members,
    )


_MEMBERS = (
    f"SELECT group_key, {_columns(GroupMember)} FROM trajectories "
    "INDEXED BY trajectories_by_group WHERE group_key IN ({}) ORDER BY group_key, slot, key"
)


def _members(connection: Connection, group_keys: Sequence[int]) -> dict[int, list[GroupMember]]:
    marks = ", ".join("?" for _ in group_keys)
    members: dict[int, list[GroupMember]] = {}
    for row in connection.execute(_MEMBERS.format(marks), list(group_keys)):
        member = {name: value for name, value in dict(row).items() if name != "group_key"}
        members.setdefault(row["group_key"], []).append(cast("GroupMember", {**member, "late": bool(member["late"])}))
    return members


# --- queries ----------------------------------------------------------------------------------------------------------


def _jobs_before(connection: Connection, page: OverviewQuery) -> list[JobRecord]:
    where: list[str] = ["key < ?"]
    values: list[Any] = [2**63 - 1 if page.cursor is None else page.cursor]
    if page.state is not None:
        where.append(f"state {'IN' if page.state == 'open' else 'NOT IN'} ({', '.join('?' * len(OPEN_STATES))})")
        values += sorted(OPEN_STATES)
    if page.search:
        where.append(f"({CONTAINS.format('job_id')} OR {CONTAINS.format('task_type')})")
        values += [like_pattern(page.search)] * 2
    query = f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY key DESC LIMIT ?"
    return [job_rows.as_job(row) for row in connection.execute(query, (*values, page.limit + 1))]


def _newest(connection: Connection, job_key: int) -> dict[str, Any]:
    """Aggregates the newest trajectories' rewards."""
    query = (
        "SELECT count(*) AS episodes, avg(reward) AS reward_mean, min(reward) AS reward_min, "
        "max(reward) AS reward_max, avg(success >= 1) AS success, avg(turns) AS turns "
        "FROM (SELECT reward, success, turns FROM trajectories "
        "INDEXED BY trajectories_to_look_at WHERE job_key = ? ORDER BY key DESC LIMIT ?)"
    )
    return dict(connection.execute(query, (job_key, NEWEST_TRAJECTORIES)).fetchone())
