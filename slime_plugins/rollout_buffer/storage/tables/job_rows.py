"""Rows of ``jobs``."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.stored_settings import DEFAULT_GROUP_TIMEOUT_S, StoredSettings, parse_settings
from slime_plugins.rollout_buffer.rules.weight_versions import KnownVersions
from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record, insert_row, update_row
from slime_plugins.rollout_buffer.types import JobState


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A row of ``jobs``.

    ``fence`` is the number of the runner that may write. ``lone_versions`` counts weight versions that were too far
    ahead; ``lone_version`` is the newest of them. ``portion`` is the number of the portion of rewards
    (``reward_sum_rows``) that new trajectories belong to.
    """

    key: int
    job_id: str
    task_type: str
    state: JobState
    cause: str
    cause_code: CauseCode
    identity: str
    trainer_identity: str | None
    engine_url: str | None
    settings: StoredSettings
    has_runner: bool
    takes_items: bool
    has_input: bool
    group_size: int
    instance_count: int
    num_epoch: int
    fence: int
    trainer_run: int
    run_began_at: float | None
    weight_version: int | None
    first_weight_version: int | None
    earlier_weight_version: int | None
    lone_versions: int
    lone_version: int | None
    refused_items: int
    last_refusal: str
    meta_info: dict[str, Any]
    created_at: float
    updated_at: float
    finished_at: float | None
    last_poll_at: float | None
    waiting_since: float | None
    portion: int

    @property
    def group_timeout_s(self) -> float | None:
        """Longest time between two items of an open group; None (the default if no items are taken) is no limit."""
        if self.settings.group_timeout_seconds is None and self.takes_items:
            return DEFAULT_GROUP_TIMEOUT_S
        return self.settings.group_timeout_seconds

    @property
    def gives_up_slow_members(self) -> bool:
        """True if the service plays the job and its groups have a timeout."""
        return self.has_runner and self.settings.group_timeout_seconds is not None

    def known_versions(self) -> KnownVersions:
        return KnownVersions(
            trainer_run=self.trainer_run,
            began_at=self.run_began_at,
            newest=self.weight_version,
            newest_before=self.earlier_weight_version,
        )


def insert_job(connection: Connection, options: Mapping[str, Any], **columns: Any) -> int:
    settings = json.dumps(columns["settings"])
    key = insert_row(connection, "jobs", {**columns, "key": _next_key(connection), "settings": settings})
    connection.execute("INSERT INTO job_options (job_key, options) VALUES (?, ?)", (key, json.dumps(options).encode()))
    return key


def options_of(connection: Connection, key: int) -> dict[str, Any]:
    """Returns the options of a job, which are passed to its generator."""
    row = connection.execute("SELECT options FROM job_options WHERE job_key = ?", (key,)).fetchone()
    return {} if row is None else json.loads(row[0])


def update_options(connection: Connection, key: int, options: Mapping[str, Any]) -> None:
    connection.execute("UPDATE job_options SET options = ? WHERE job_key = ?", (json.dumps(options).encode(), key))


def _next_key(connection: Connection) -> int:
    """Returns a key that was never used."""
    query = (
        "UPDATE counters SET last = max(last, coalesce((SELECT max(key) FROM jobs), 0)) + 1 WHERE name = 'job' "
        "RETURNING last"
    )
    return int(connection.execute(query).fetchone()[0])


def find_job(connection: Connection, job_id: str) -> JobRecord | None:
    row = connection.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    return None if row is None else as_job(row)


def get_job(connection: Connection, key: int) -> JobRecord:
    return as_job(connection.execute("SELECT * FROM jobs WHERE key = ?", (key,)).fetchone())


def fence_and_state(connection: Connection, key: int) -> tuple[int, JobState]:
    """Returns the columns of a job by which each write of a runner is checked."""
    fence, state = connection.execute("SELECT fence, state FROM jobs WHERE key = ?", (key,)).fetchone()
    return fence, JobState(state)


def last_job(connection: Connection) -> JobRecord | None:
    """Returns the newest job; None when there was none yet."""
    row = connection.execute("SELECT * FROM jobs ORDER BY key DESC LIMIT 1").fetchone()
    return None if row is None else as_job(row)


def all_jobs(connection: Connection) -> list[JobRecord]:
    """Returns every job, newest first."""
    return [as_job(row) for row in connection.execute("SELECT * FROM jobs ORDER BY key DESC")]


def jobs_in_states(connection: Connection, states: Iterable[JobState]) -> list[JobRecord]:
    """Returns the jobs in the given states, oldest first."""
    wanted = list(states)
    marks = ", ".join("?" for _ in wanted)
    return [
        as_job(row) for row in connection.execute(f"SELECT * FROM jobs WHERE state IN ({marks}) ORDER BY key", wanted)
    ]


def jobs_with_groups_for_a_trainer(connection: Connection) -> list[JobRecord]:
    """Returns the jobs that a poll without a job id may refer to: running, paused, or with ready or leased groups."""
    rows = connection.execute(
        "SELECT * FROM jobs WHERE state IN ('running', 'paused') OR EXISTS "
        "(SELECT 1 FROM groups WHERE job_key = jobs.key AND state IN ('ready', 'leased')) ORDER BY key"
    )
    return [as_job(row) for row in rows]


def update_job(connection: Connection, key: int, **columns: Any) -> None:
    update_row(connection, "jobs", key, columns)


def as_job(row: sqlite3.Row) -> JobRecord:
    return as_record(
        JobRecord,
        row,
        state=JobState(row["state"]),
        cause_code=CauseCode(row["cause_code"]),
        settings=parse_settings(row["settings"]),
        meta_info=orjson.loads(row["meta_info"]),
        **{name: bool(row[name]) for name in ("has_runner", "takes_items", "has_input")},
    )


def known_versions(connection: Connection, job_key: int) -> KnownVersions:
    query = "SELECT trainer_run, run_began_at, weight_version, earlier_weight_version FROM jobs WHERE key = ?"
    run, began_at, newest, before = connection.execute(query, (job_key,)).fetchone()
    return KnownVersions(trainer_run=run, began_at=began_at, newest=newest, newest_before=before)


def note_weight_versions(connection: Connection, job_key: int, oldest: int, newest: int) -> int:
    """Records weight versions of the trainer's present run and returns the newest version of that run."""
    row = connection.execute(
        "UPDATE jobs SET weight_version = max(coalesce(weight_version, ?1), ?1), "
        "first_weight_version = min(coalesce(first_weight_version, ?2), ?2) WHERE key = ?3 RETURNING weight_version",
        (newest, oldest, job_key),
    ).fetchone()
    return int(row[0])


def note_outlier_version(connection: Connection, job_key: int, version: int) -> None:
    """Counts a weight version that is too far ahead."""
    query = "UPDATE jobs SET lone_versions = lone_versions + 1, lone_version = ? WHERE key = ?"
    connection.execute(query, (version, job_key))


def note_refused_items(connection: Connection, job_key: int, count: int, why: str) -> None:
    query = "UPDATE jobs SET refused_items = refused_items + ?, last_refusal = ? WHERE key = ?"
    connection.execute(query, (count, why, job_key))


def begin_trainer_run(connection: Connection, job_key: int, now: float) -> None:
    """Begins the trainer's next run, in which weight versions are ordered independently."""
    connection.execute(
        "UPDATE jobs SET trainer_run = trainer_run + 1, run_began_at = ?, weight_version = NULL, "
        "earlier_weight_version = coalesce(weight_version, earlier_weight_version), first_weight_version = NULL "
        "WHERE key = ?",
        (now, job_key),
    )
