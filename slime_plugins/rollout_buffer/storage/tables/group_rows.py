"""Rows of ``groups``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause, CauseCode, CountedCause
from slime_plugins.rollout_buffer.rules.skip_list import KnownGroup
from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record, update_row
from slime_plugins.rollout_buffer.types import GroupState, Instance


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A row of ``groups``."""

    key: int
    job_key: int
    epoch: int
    position: int
    instance_id: str
    task: str
    state: GroupState
    cause: str
    cause_code: CauseCode
    opened_at: float | None
    last_write_at: float | None
    delivery_key: int | None

    def attempt_uid(self, slot: int, attempt: int) -> str:
        """Returns the uid of an attempt at a slot, and of its trajectory."""
        uid = AttemptUid(job_key=self.job_key, epoch=self.epoch, position=self.position, slot=slot, attempt=attempt)
        return str(uid)


def insert_groups(
    connection: Connection,
    job_key: int,
    groups: Iterable[tuple[int, int, Instance]],
    state: GroupState = GroupState.OPEN,
    cause: Cause = NO_CAUSE,
) -> int:
    """Adds the groups (epoch, position, instance) that a job does not have; returns their number."""
    return connection.executemany(
        "INSERT INTO groups (job_key, epoch, position, instance_id, task, state, cause, cause_code) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (
            (job_key, epoch, position, line.instance_id, line.task, state.value, cause.message, cause.code.value)
            for epoch, position, line in groups
        ),
    ).rowcount


def insert_group_of_new_instance(connection: Connection, job_key: int, instance_id: str) -> None:
    """Adds an open group for an instance that is not in the input."""
    query = "UPDATE jobs SET instance_count = instance_count + 1 WHERE key = ? RETURNING instance_count - 1"
    position = int(connection.execute(query, (job_key,)).fetchone()[0])
    instance = Instance(instance_id=instance_id, data={})
    insert_groups(connection, job_key, [(0, position, instance)])


def count_groups_of_instance(connection: Connection, job_key: int, instance_id: str) -> int:
    """Counts the groups of an instance that have rows."""
    query = "SELECT count(*) FROM groups WHERE job_key = ? AND instance_id = ?"
    return int(connection.execute(query, (job_key, instance_id)).fetchone()[0])


def count_by_instance(connection: Connection, job_key: int) -> dict[str, int]:
    """Counts the groups that have rows, by instance id."""
    query = "SELECT instance_id, count(*) FROM groups WHERE job_key = ? GROUP BY instance_id"
    return {row[0]: int(row[1]) for row in connection.execute(query, (job_key,))}


def known_groups(connection: Connection, job_key: int) -> list[KnownGroup]:
    """Returns the groups of a job that have rows, in epoch order, for ``rules/skip_list.py``."""
    query = (
        "SELECT key, instance_id, state, delivery_key, cause_code = 'skip_list' AS by_skip_list FROM groups "
        "WHERE job_key = ? ORDER BY epoch, position"
    )
    rows = connection.execute(query, (job_key,))
    return [
        as_record(KnownGroup, row, state=GroupState(row["state"]), by_skip_list=bool(row["by_skip_list"]))
        for row in rows
    ]


def get_group(connection: Connection, key: int) -> GroupRecord:
    return as_group(connection.execute("SELECT * FROM groups WHERE key = ?", (key,)).fetchone())


def find_group(connection: Connection, job_key: int, epoch: int, position: int) -> GroupRecord | None:
    """Returns the group of an epoch at a position of the input; None if it has no row."""
    query = "SELECT * FROM groups WHERE job_key = ? AND epoch = ? AND position = ?"
    row = connection.execute(query, (job_key, epoch, position)).fetchone()
    return None if row is None else as_group(row)


def open_groups(connection: Connection, job_key: int, *, after: tuple[int, int], limit: int) -> list[GroupRecord]:
    """Returns up to ``limit`` open groups that follow ``after`` (epoch, position) in playing order."""
    query = (
        "SELECT * FROM groups WHERE job_key = ? AND state = 'open' AND (epoch, position) > (?, ?) "
        "ORDER BY epoch, position LIMIT ?"
    )
    return [as_group(row) for row in connection.execute(query, (job_key, *after, limit))]


def open_groups_with_room(connection: Connection, job_key: int, group_size: int) -> Iterator[GroupRecord]:
    """Yields open groups with a free slot, in playing order."""
    query = (
        "SELECT * FROM groups g WHERE job_key = ? AND state = 'open' AND "
        "(SELECT count(*) FROM trajectories WHERE group_key = g.key AND late = 0) + "
        "(SELECT count(*) FROM attempts WHERE group_key = g.key AND state = 'running') < ? "
        "ORDER BY epoch, position"
    )
    return (as_group(row) for row in connection.execute(query, (job_key, group_size)))


def groups_of_instance(connection: Connection, job_key: int, instance_id: str) -> list[GroupRecord]:
    """Returns the groups of an instance, earliest epoch first."""
    query = "SELECT * FROM groups WHERE job_key = ? AND instance_id = ? ORDER BY epoch"
    return [as_group(row) for row in connection.execute(query, (job_key, instance_id))]


def full_groups(
    connection: Connection, job_key: int, *, group_size: int, max_attempts: int, only: int | None = None
) -> list[int]:
    """Returns the keys of the full groups among a job's open groups, or of the group ``only`` if it is full.

    Each slot of a full group has a trajectory, or ``max_attempts`` failures and no running attempt.
    """
    which = "job_key = :job_key" if only is None else "key = :only"
    query = (
        f"SELECT key FROM groups g WHERE {which} AND state = 'open' AND "
        "(SELECT count(*) FROM trajectories WHERE group_key = g.key AND late = 0) + "
        "(SELECT count(*) FROM (SELECT 1 FROM attempts a WHERE group_key = g.key AND NOT EXISTS "
        "(SELECT 1 FROM trajectories t WHERE t.group_key = g.key AND t.slot = a.slot AND late = 0) "
        "GROUP BY slot HAVING sum(state = 'failed') >= :max_attempts AND NOT sum(state = 'running'))) >= :group_size"
    )
    parameters = {"job_key": job_key, "only": only, "group_size": group_size, "max_attempts": max_attempts}
    return [int(row[0]) for row in connection.execute(query, parameters)]


def short_groups(connection: Connection, job_key: int, group_size: int) -> list[GroupRecord]:
    """Returns closed groups with fewer trajectories than slots, except leased and skipped ones."""
    query = (
        "SELECT * FROM groups g WHERE job_key = ? AND state IN ('ready', 'delivered', 'filtered', 'failed') AND "
        "(SELECT count(*) FROM trajectories WHERE group_key = g.key AND late = 0) < ?"
    )
    return [as_group(row) for row in connection.execute(query, (job_key, group_size))]


def reopen_groups(connection: Connection, keys: Sequence[int], now: float) -> None:
    """Reopens closed groups: trajectories stay, padding is deleted, and the group timeout starts again."""
    connection.executemany("DELETE FROM members WHERE group_key = ?", [(key,) for key in keys])
    connection.executemany(
        "UPDATE groups SET state = 'open', cause = '', cause_code = '', closed_at = NULL, sequence = NULL, "
        "delivery_key = NULL, last_write_at = CASE WHEN last_write_at IS NULL THEN NULL ELSE ? END WHERE key = ?",
        [(now, key) for key in keys],
    )


def count_with_cause(connection: Connection, job_key: int, state: GroupState, code: CauseCode) -> int:
    """Counts the filtered or failed groups with one cause."""
    query = (
        "SELECT count(*) FROM groups INDEXED BY groups_by_cause "
        "WHERE state IN ('filtered', 'failed') AND job_key = ? AND state = ? AND cause_code = ?"
    )
    return int(connection.execute(query, (job_key, state.value, code.value)).fetchone()[0])


def failed_groups(connection: Connection, job_key: int) -> list[int]:
    """Returns the keys of the groups that failed."""
    query = "SELECT key FROM groups WHERE job_key = ? AND state = 'failed'"
    return [int(row[0]) for row in connection.execute(query, (job_key,))]


def open_groups_with_items(connection: Connection, job_key: int) -> list[GroupRecord]:
    """Returns open groups with a written item."""
    query = "SELECT * FROM groups WHERE job_key = ? AND state = 'open' AND last_write_at IS NOT NULL"
    return [as_group(row) for row in connection.execute(query, (job_key,))]


def idle_groups(connection: Connection, job_key: int, since: float, sessions_seen_at: float) -> list[GroupRecord]:
    """Returns open groups that have a trajectory, and since ``since`` neither a new one nor an attempt.

    An attempt counts until it ended. If it runs, it counts until ``sessions_seen_at``, and at least when it began.
    """
    query = (
        "SELECT * FROM groups g WHERE job_key = ? AND state = 'open' AND last_write_at < ? AND NOT EXISTS "
        "(SELECT 1 FROM attempts WHERE group_key = g.key AND max(started_at, coalesce(ended_at, ?)) >= ?)"
    )
    return [as_group(row) for row in connection.execute(query, (job_key, since, sessions_seen_at, since))]


def started_open_groups(connection: Connection, job_key: int) -> list[GroupRecord]:
    """Returns open groups with an attempt or a written item, oldest first."""
    query = (
        "SELECT * FROM groups WHERE job_key = ? AND state = 'open' AND opened_at IS NOT NULL "
        "ORDER BY opened_at, epoch, position"
    )
    return [as_group(row) for row in connection.execute(query, (job_key,))]


def restart_group_clocks(connection: Connection, job_key: int, now: float) -> None:
    """Sets the last write of all open groups with a written item to ``now``: their timeouts begin again."""
    query = "UPDATE groups SET last_write_at = ? WHERE job_key = ? AND state = 'open' AND last_write_at IS NOT NULL"
    connection.execute(query, (now, job_key))


def update_group(connection: Connection, key: int, **columns: Any) -> None:
    update_row(connection, "groups", key, columns)


def next_sequence(connection: Connection) -> int:
    """Returns the next sequence number of a group that becomes ready."""
    row = connection.execute(
        "SELECT sequence FROM groups INDEXED BY groups_by_sequence WHERE sequence IS NOT NULL "
        "ORDER BY sequence DESC LIMIT 1"
    ).fetchone()
    return 1 if row is None else int(row[0]) + 1


def move_groups(connection: Connection, job_key: int, source: GroupState, target: GroupState, cause: Cause) -> None:
    """Changes the state of all groups of a job that are in state ``source``."""
    connection.execute(
        "UPDATE groups SET state = :target, cause = :cause, cause_code = :cause_code "
        "WHERE job_key = :job_key AND state = :source",
        {"target": target.value, "job_key": job_key, "source": source.value, **cause.columns()},
    )


def count_groups(connection: Connection, job_key: int) -> dict[GroupState, int]:
    """Counts the groups of a job by state, including planned groups without a row."""
    counted = dict.fromkeys(GroupState, 0)
    query = (
        "SELECT state, count(*) FROM groups WHERE job_key = :job GROUP BY state "
        "UNION ALL SELECT 'open', unopened FROM plans WHERE job_key = :job "
        "UNION ALL SELECT 'skipped', skipped FROM plans WHERE job_key = :job"
    )
    for state, count in connection.execute(query, {"job": job_key}):
        counted[GroupState(state)] += count
    return counted


def count_started(connection: Connection, job_key: int) -> int:
    """Counts the open groups of a job with an attempt or a written item."""
    query = "SELECT count(*) FROM groups WHERE job_key = ? AND state = 'open' AND opened_at IS NOT NULL"
    return int(connection.execute(query, (job_key,)).fetchone()[0])


def count_causes(connection: Connection, job_key: int) -> dict[str, dict[str, int]]:
    """Counts filtered and failed groups by state and cause, of the 50 most frequent causes."""
    query = (
        "SELECT state, cause, count(*) FROM groups INDEXED BY groups_by_cause "
        "WHERE job_key = ? AND state IN ('filtered', 'failed') GROUP BY state, cause ORDER BY 3 DESC LIMIT 50"
    )
    causes: dict[str, dict[str, int]] = {}
    for state, cause, count in connection.execute(query, (job_key,)):
        causes.setdefault(state, {})[cause] = count
    return causes


def most_frequent_causes(connection: Connection, job_key: int) -> dict[GroupState, CountedCause]:
    """Returns the most frequent cause of filtered and of failed groups; a state without such groups is left out."""
    query = (
        "SELECT state, cause_code, cause, count(*) FROM groups INDEXED BY groups_by_cause "
        "WHERE job_key = ? AND state IN ('filtered', 'failed') GROUP BY state, cause_code, cause ORDER BY 4"
    )
    return {
        GroupState(state): CountedCause(Cause(CauseCode(code), message), count)
        for state, code, message, count in connection.execute(query, (job_key,))
    }


def as_group(row: sqlite3.Row) -> GroupRecord:
    return as_record(GroupRecord, row, state=GroupState(row["state"]), cause_code=CauseCode(row["cause_code"]))
