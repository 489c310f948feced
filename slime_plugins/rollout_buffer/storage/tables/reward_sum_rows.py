"""Rows of ``portion_sums``: sums of rewards, for the statistics in ``meta_info``.

A portion is what a job stored between two deliveries. It has a row for each outcome, and is reported by one delivery.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSums:
    """Sums over trajectories, from which every statistic of ``meta_info`` follows."""

    samples: int
    groups: int
    total: float
    square_total: float
    low: float | None
    high: float | None


def report_ended_groups(connection: Connection, job_key: int, delivery_key: int) -> dict[int, str]:
    """Marks the unreported filtered and failed groups as reported in this delivery.

    Returns their instance ids by group, in the order in which they were closed.
    """
    rows = connection.execute(
        "UPDATE groups INDEXED BY groups_unreported SET delivery_key = ? WHERE job_key = ? "
        "AND state IN ('filtered', 'failed') AND delivery_key IS NULL RETURNING closed_at, instance_id, key",
        (delivery_key, job_key),
    ).fetchall()
    return {row[2]: row[1] for row in sorted(rows, key=tuple)}


def sum_unreported(connection: Connection, job_key: int, delivery_key: int) -> tuple[RewardSums, dict[str, int]]:
    """Sums the unreported rewards, those of filtered groups included, and marks them as reported in this delivery.

    Triggers keep ``portion_sums`` up to date, so that this takes the same time however much was written.
    """
    rows = connection.execute(
        "SELECT portion, outcome, samples, groups, total, square_total, low, high FROM portion_sums "
        "WHERE job_key = ? AND reported_in IS NULL",
        (job_key,),
    ).fetchall()
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + row["samples"]
    sums = RewardSums(
        samples=sum(outcomes.values()),
        groups=_count_groups_in(connection, job_key, rows),
        total=sum((row["total"] for row in rows), 0.0),
        square_total=sum((row["square_total"] for row in rows), 0.0),
        low=min((row["low"] for row in rows), default=None),
        high=max((row["high"] for row in rows), default=None),
    )
    if rows:
        query = "UPDATE portion_sums SET reported_in = ? WHERE job_key = ? AND reported_in IS NULL"
        connection.execute(query, (delivery_key, job_key))
        connection.execute("UPDATE jobs SET portion = portion + 1 WHERE key = ?", (job_key,))
    return sums, outcomes


def _count_groups_in(connection: Connection, job_key: int, rows: Sequence[sqlite3.Row]) -> int:
    portions = sorted({row["portion"] for row in rows})
    if len(portions) <= 1:
        return sum(row["groups"] for row in rows)
    # A delivery was undone, and its portion is reported together with the present one: a group may be in both.
    counted_keys: set[int] = set()
    for portion in portions:
        query = "SELECT DISTINCT group_key FROM trajectories WHERE job_key = ? AND portion = ? AND group_key NOT NULL"
        counted_keys.update(row[0] for row in connection.execute(query, (job_key, portion)))
    return len(counted_keys)


def report_again(connection: Connection, group_keys: Sequence[int]) -> None:
    """Moves the trajectories of groups into their job's present portion: the next delivery reports them again."""
    changed: set[tuple[int, int]] = set()
    for key in group_keys:
        query = "SELECT DISTINCT job_key, portion FROM trajectories WHERE group_key = ?"
        changed.update((row[0], row[1]) for row in connection.execute(query, (key,)))
        connection.execute(
            "UPDATE trajectories SET portion = (SELECT portion FROM jobs WHERE key = job_key) WHERE group_key = ?",
            (key,),
        )
    for job_key in {job_key for job_key, _ in changed}:
        portion = connection.execute("SELECT portion FROM jobs WHERE key = ?", (job_key,)).fetchone()[0]
        changed.add((job_key, portion))
    for job_key, portion in changed:
        _sum_portion(connection, job_key, portion)


def _sum_portion(connection: Connection, job_key: int, portion: int) -> None:
    """Computes the rows of a portion again; the row of the first outcome has the number of all its groups."""
    key = (job_key, portion)
    query = "SELECT reported_in FROM portion_sums WHERE job_key = ? AND portion = ? LIMIT 1"
    reported_in = connection.execute(query, key).fetchone()
    connection.execute("DELETE FROM portion_sums WHERE job_key = ? AND portion = ?", key)
    connection.execute(
        "INSERT INTO portion_sums SELECT job_key, portion, outcome, count(*), 0, total(reward), "
        "total(reward * reward), min(reward), max(reward), ? FROM trajectories "
        "WHERE job_key = ? AND portion = ? GROUP BY outcome",
        (None if reported_in is None else reported_in[0], *key),
    )
    connection.execute(
        "UPDATE portion_sums SET groups = (SELECT count(DISTINCT group_key) FROM trajectories WHERE job_key = ? AND "
        "portion = ?) WHERE job_key = ? AND portion = ? AND outcome = (SELECT min(outcome) FROM portion_sums WHERE "
        "job_key = ? AND portion = ?)",
        (*key, *key, *key),
    )
