"""Rows of ``deliveries`` and ``delivery_groups``, and the states of groups that deliveries change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.rules.causes import Cause
from slime_plugins.rollout_buffer.storage.tables import group_rows, reward_sum_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record, insert_row, update_row
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.types import DeliveryState, GroupState
from slime_plugins.rollout_buffer.wire.delivery_replies import MetaInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryRecord:
    """A row of ``deliveries``."""

    key: int
    delivery_id: str
    job_key: int
    state: DeliveryState
    lease_s: float | None
    meta_info: MetaInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveredMember:
    """A member of a delivered group, with its payload or a ref to it; a dummy has neither."""

    uid: str
    source_uid: str | None
    instance_id: str
    group_key: int
    epoch: int
    slot: int
    reward: float | None
    raw_reward: float | None
    remove_sample: bool
    outcome: str
    stop_reason: str
    oldest_version: int | None
    body: bytes | None
    body_place: str | None


def insert_delivery(connection: Connection, **columns: Any) -> int:
    return insert_row(connection, "deliveries", {**columns, "meta_info": json.dumps(columns["meta_info"])})


def find_delivery(connection: Connection, delivery_id: str) -> DeliveryRecord | None:
    row = connection.execute("SELECT * FROM deliveries WHERE delivery_id = ?", (delivery_id,)).fetchone()
    return None if row is None else as_delivery(row)


def job_of(connection: Connection, delivery_key: int) -> int:
    return int(connection.execute("SELECT job_key FROM deliveries WHERE key = ?", (delivery_key,)).fetchone()[0])


def delivery_of_poll(connection: Connection, job_key: int, consumer_id: str, poll_id: str) -> DeliveryRecord | None:
    """Returns the delivery of an earlier call of the same poll."""
    query = "SELECT * FROM deliveries WHERE job_key = ? AND consumer_id = ? AND poll_id = ?"
    row = connection.execute(query, (job_key, consumer_id, poll_id)).fetchone()
    return None if row is None else as_delivery(row)


def expired_leases(connection: Connection, now: float) -> list[DeliveryRecord]:
    """Returns leased deliveries whose lease has expired."""
    query = "SELECT * FROM deliveries WHERE state = 'leased' AND lease_expires_at <= ?"
    return [as_delivery(row) for row in connection.execute(query, (now,))]


def shorten_leases(connection: Connection, now: float) -> None:
    """Limits the remaining time of each lease to the length of the lease.

    The remaining time is longer only if the clock was set back; up to 1 s more is tolerated.
    """
    query = (
        "UPDATE deliveries SET lease_expires_at = ? + lease_s WHERE state = 'leased' AND lease_expires_at > ? + lease_s"
    )
    connection.execute(query, (now, now + 1.0))


def leased_deliveries(connection: Connection, job_key: int) -> list[DeliveryRecord]:
    """Returns the deliveries of a job that are leased."""
    query = "SELECT * FROM deliveries WHERE state = 'leased' AND job_key = ?"
    return [as_delivery(row) for row in connection.execute(query, (job_key,))]


def oldest_expired_delivery(connection: Connection, job_key: int) -> DeliveryRecord | None:
    """Returns the oldest expired delivery that still has ready groups."""
    query = (
        "SELECT * FROM deliveries WHERE job_key = ? AND state = 'expired' AND EXISTS (SELECT 1 FROM groups "
        "WHERE delivery_key = deliveries.key AND state = 'ready') ORDER BY key LIMIT 1"
    )
    row = connection.execute(query, (job_key,)).fetchone()
    return None if row is None else as_delivery(row)


def dissolve_delivery(connection: Connection, delivery_key: int) -> None:
    """Takes the ready groups out of a delivery that cannot be redelivered whole.

    The filtered and failed groups and the rewards that it reported are reported again by the next delivery.
    """
    connection.execute(
        "UPDATE groups SET delivery_key = NULL WHERE delivery_key = ? AND state IN ('ready', 'filtered', 'failed')",
        (delivery_key,),
    )
    connection.execute("UPDATE portion_sums SET reported_in = NULL WHERE reported_in = ?", (delivery_key,))


def move_groups_to_delivery(connection: Connection, source: int, target: int, state: GroupState) -> None:
    """Assigns the groups of ``source``, and what it reported, to another delivery of the same job.

    Ready groups get ``state``. The rows of ``source`` in ``delivery_groups`` stay.
    """
    connection.execute(
        "INSERT INTO delivery_groups (delivery_key, ordinal, group_key) "
        "SELECT ?, ordinal, group_key FROM delivery_groups WHERE delivery_key = ?",
        (target, source),
    )
    connection.execute(
        "UPDATE groups SET delivery_key = ?, state = CASE state WHEN 'ready' THEN ? ELSE state END "
        "WHERE delivery_key = ?",
        (target, state.value, source),
    )
    connection.execute("UPDATE portion_sums SET reported_in = ? WHERE reported_in = ?", (target, source))


def update_delivery(connection: Connection, key: int, **columns: Any) -> None:
    update_row(connection, "deliveries", key, columns)


def insert_delivery_groups(connection: Connection, delivery_key: int, group_keys: Sequence[int]) -> None:
    """Stores the groups of a delivery, in order."""
    rows = ((delivery_key, ordinal, key) for ordinal, key in enumerate(group_keys))
    connection.executemany("INSERT INTO delivery_groups (delivery_key, ordinal, group_key) VALUES (?, ?, ?)", rows)


def groups_in_delivery(connection: Connection, delivery_key: int) -> list[GroupRecord]:
    """Returns the groups of a delivery in order."""
    query = (
        "SELECT groups.* FROM delivery_groups JOIN groups ON groups.key = group_key "
        "WHERE delivery_groups.delivery_key = ? ORDER BY ordinal"
    )
    return [group_rows.as_group(row) for row in connection.execute(query, (delivery_key,))]


def ready_groups(connection: Connection, job_key: int, limit: int | None) -> list[GroupRecord]:
    """Returns at most ``limit`` ready groups, all if it is None, in the order in which they were opened."""
    query = "SELECT * FROM groups WHERE job_key = ? AND state = 'ready' ORDER BY opened_at, sequence LIMIT ?"
    return [group_rows.as_group(row) for row in connection.execute(query, (job_key, -1 if limit is None else limit))]


def count_ready_and_leased(connection: Connection, job_key: int) -> tuple[int, int]:
    """Counts the groups of a job that wait for the trainer."""
    query = (
        "SELECT count(*) FILTER (WHERE state = 'ready'), count(*) FILTER (WHERE state = 'leased') FROM groups "
        "WHERE job_key = ? AND state IN ('ready', 'leased')"
    )
    ready, leased = connection.execute(query, (job_key,)).fetchone()
    return int(ready), int(leased)


def has_groups(connection: Connection, job_key: int, *states: GroupState) -> bool:
    """Returns True if a job has a group in one of the states; planned groups without a row are open."""
    query = (
        "SELECT 1 FROM groups WHERE job_key = :job AND state = :state "
        "UNION ALL SELECT 1 FROM plans WHERE job_key = :job AND unopened > 0 AND :state = 'open' LIMIT 1"
    )
    values = ({"job": job_key, "state": state.value} for state in states)
    return any(connection.execute(query, of_state).fetchone() is not None for of_state in values)


def make_ready_again(connection: Connection, group_keys: Sequence[int]) -> None:
    """Makes delivered groups ready again, and their rewards unreported."""
    rows = [(key,) for key in group_keys]
    connection.executemany("UPDATE groups SET state = 'ready', delivery_key = NULL WHERE key = ?", rows)
    reward_sum_rows.report_again(connection, group_keys)


def make_unreported(connection: Connection, group_keys: Sequence[int]) -> None:
    """Makes the next delivery report these filtered and failed groups again."""
    connection.executemany("UPDATE groups SET delivery_key = NULL WHERE key = ?", [(key,) for key in group_keys])


def unskip_groups(connection: Connection, group_keys: Sequence[int]) -> None:
    """Makes skipped groups ready again if they were judged before, else open."""
    rows = [(key,) for key in group_keys]
    connection.executemany(
        "UPDATE groups SET cause = '', cause_code = '', delivery_key = NULL, state = "
        "CASE WHEN EXISTS (SELECT 1 FROM members WHERE group_key = groups.key) THEN 'ready' ELSE 'open' END "
        "WHERE key = ? AND state = 'skipped'",
        rows,
    )
    reward_sum_rows.report_again(connection, group_keys)


def set_groups(connection: Connection, group_keys: Sequence[int], state: GroupState, cause: Cause) -> None:
    """Changes the state of groups, with the cause."""
    rows = [(state.value, cause.message, cause.code.value, key) for key in group_keys]
    connection.executemany("UPDATE groups SET state = ?, cause = ?, cause_code = ? WHERE key = ?", rows)


def set_groups_of_delivery(connection: Connection, delivery_key: int, source: GroupState, target: GroupState) -> None:
    """Changes the state of those groups of a delivery that are in state ``source``."""
    connection.execute(
        "UPDATE groups SET state = ? WHERE delivery_key = ? AND state = ?", (target.value, delivery_key, source.value)
    )


def delivered_members(connection: Connection, group_key: int) -> list[DeliveredMember]:
    """Returns the members of a group in delivery order, with their payloads or refs."""
    query = (
        "SELECT members.uid, members.source_uid, members.reward, members.raw_reward, members.remove_sample, "
        "groups.key AS group_key, groups.instance_id, groups.epoch, members.ordinal AS slot, "
        "coalesce(trajectories.outcome, 'failed') AS outcome, coalesce(trajectories.stop_reason, 'aborted') AS "
        "stop_reason, trajectories.oldest_version, trajectories.body, trajectories.body_place "
        "FROM groups JOIN members ON members.group_key = groups.key "
        "LEFT JOIN trajectories ON trajectories.job_key = groups.job_key AND trajectories.uid = members.source_uid "
        "WHERE groups.key = ? ORDER BY members.ordinal"
    )
    rows = connection.execute(query, (group_key,))
    return [as_record(DeliveredMember, row, remove_sample=bool(row["remove_sample"])) for row in rows]


def as_delivery(row: sqlite3.Row) -> DeliveryRecord:
    state, meta_info = DeliveryState(row["state"]), json.loads(row["meta_info"])
    return as_record(DeliveryRecord, row, state=state, meta_info=meta_info)
