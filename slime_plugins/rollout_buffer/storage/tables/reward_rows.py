"""Rows of ``reward_versions`` and ``trajectory_rewards``. Both are added and never changed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.connection import Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A judge's rewards of a trajectory, and optionally of its turns and tokens."""

    reward: float
    turn_rewards: Sequence[float] | None = None
    token_rewards: Sequence[Sequence[float] | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnscoredTrajectory:
    """A trajectory that has no reward of a given version yet."""

    uid: str
    instance_id: str
    reward: float
    raw_reward: float | None
    outcome: str
    stop_reason: str


def open_version(connection: Connection, job_key: int, name: str, scorer: str, now: float) -> int:
    """Returns the number of the version with that name; adds the version under the next number if there is none."""
    query = "SELECT version FROM reward_versions WHERE job_key = ? AND name = ?"
    known = connection.execute(query, (job_key, name)).fetchone()
    if known is not None:
        return int(known[0])
    query = "SELECT coalesce(max(version), 0) + 1 FROM reward_versions WHERE job_key = ?"
    version = int(connection.execute(query, (job_key,)).fetchone()[0])
    connection.execute(
        "INSERT INTO reward_versions (job_key, version, name, scorer, created_at) VALUES (?, ?, ?, ?, ?)",
        (job_key, version, name, scorer, now),
    )
    return version


def versions_of_job(connection: Connection, job_key: int) -> list[int]:
    """Returns a job's versions in order."""
    query = "SELECT version FROM reward_versions WHERE job_key = ? ORDER BY version"
    return [row[0] for row in connection.execute(query, (job_key,))]


def unscored(connection: Connection, job_key: int, version: int) -> list[UnscoredTrajectory]:
    """Returns the trajectories of a job that have no reward of the version yet, oldest first."""
    query = (
        "SELECT uid, instance_id, reward, raw_reward, outcome, stop_reason FROM trajectories "
        "WHERE job_key = ? AND NOT EXISTS (SELECT 1 FROM trajectory_rewards AS given WHERE "
        "given.job_key = trajectories.job_key AND given.version = ? AND given.uid = trajectories.uid) ORDER BY key"
    )
    return [UnscoredTrajectory(**dict(row)) for row in connection.execute(query, (job_key, version))]


def insert_score(connection: Connection, job_key: int, version: int, uid: str, score: Score, now: float) -> bool:
    """Adds a reward; returns False if the trajectory already has a reward of that version."""
    inserted = connection.execute(
        "INSERT OR IGNORE INTO trajectory_rewards (job_key, version, uid, reward, turn_rewards, token_rewards, "
        "scored_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (job_key, version, uid, score.reward, _text(score.turn_rewards), _text(score.token_rewards), now),
    )
    return inserted.rowcount == 1


def scores_of_delivery(connection: Connection, delivery_key: int, version: int) -> dict[tuple[int, str], Score | None]:
    """Returns the scores of the played members of a delivery by group and uid; None for a member without a score."""
    query = (
        "SELECT members.group_key, members.uid, given.reward, given.turn_rewards, given.token_rewards "
        "FROM delivery_groups JOIN groups ON groups.key = delivery_groups.group_key "
        "JOIN members ON members.group_key = groups.key "
        "LEFT JOIN trajectory_rewards AS given ON given.job_key = groups.job_key AND given.version = ? "
        "AND given.uid = members.source_uid "
        "WHERE delivery_groups.delivery_key = ? AND members.remove_sample = 0"
    )
    rows = connection.execute(query, (version, delivery_key))
    return {(row["group_key"], row["uid"]): _score_of(row) for row in rows}


def _score_of(row: sqlite3.Row) -> Score | None:
    if row["reward"] is None:
        return None
    turn_rewards, token_rewards = _list(row["turn_rewards"]), _list(row["token_rewards"])
    return Score(reward=row["reward"], turn_rewards=turn_rewards, token_rewards=token_rewards)


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _list(text: str | None) -> Any:
    return None if text is None else json.loads(text)
