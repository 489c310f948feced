"""Read-only queries of a job's failed attempts: their errors, and their transcripts where these are stored."""

from __future__ import annotations

import sqlite3
from typing import Any

from slime_plugins.rollout_buffer.reporting.inspection import CONTAINS, like_pattern
from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.state.transcripts import decode_failed_attempt
from slime_plugins.rollout_buffer.storage.data_dir import RUNNER_LOG
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.wire.group_replies import FailedAttempt, FailedAttemptPage
from slime_plugins.rollout_buffer.wire.query_params import AttemptPageQuery


def failed_attempts(store: Store, job_id: str, page: AttemptPageQuery) -> FailedAttemptPage:
    """Returns one page of a job's failed attempts with their errors, the last ended first.

    Raises:
        NotFoundError: there is no such job.
    """
    with store.read() as connection:
        job = find_job(connection, job_id)
        conditions, values = _attempt_conditions(job.key, page)
        query = f"{_FAILED} WHERE {' AND '.join(conditions)} {_LAST_ENDED_FIRST} LIMIT ?"
        rows = connection.execute(query, (*values, page.limit + 1)).fetchall()
    shown = rows[: page.limit]
    last = shown[-1] if len(rows) > page.limit else None
    return FailedAttemptPage(
        job_id=job.job_id,
        log=str(store.data_dir.absolute() / RUNNER_LOG.format(job.key)) if job.has_runner else None,
        attempts=[_failed_attempt(job, row, page) for row in shown],
        next_cursor=None if last is None else ":".join(str(last[name]) for name in _ATTEMPT_ORDER),
    )


_ATTEMPT_ORDER = ("ended_at", "group_key", "slot", "attempt")
_FAILED = (
    "SELECT a.group_key AS group_key, a.slot AS slot, a.attempt AS attempt, groups.epoch, groups.position, "
    "groups.instance_id, a.error_code, a.error_message, a.started_at, a.ended_at AS ended_at, transcripts.messages "
    "FROM attempts AS a INDEXED BY attempts_failed JOIN groups ON groups.key = a.group_key "
    "LEFT JOIN failed_transcripts AS transcripts ON transcripts.group_key = a.group_key AND transcripts.slot = a.slot "
    "AND transcripts.attempt = a.attempt"
)
_LAST_ENDED_FIRST = "ORDER BY a.ended_at DESC, a.group_key DESC, a.slot DESC, a.attempt DESC"


def _attempt_conditions(job_key: int, page: AttemptPageQuery) -> tuple[list[str], list[Any]]:
    conditions: list[str] = ["a.state = 'failed'", "groups.job_key = ?"]
    values: list[Any] = [job_key]
    if page.cursor is not None:
        ended_at, *attempt_key = page.cursor.split(":")
        conditions.append("(a.ended_at, a.group_key, a.slot, a.attempt) < (?, ?, ?, ?)")
        values += [float(ended_at), *map(int, attempt_key)]
    if page.error_code is not None:
        conditions.append("a.error_code = ?")
        values.append(page.error_code)
    if page.search is not None:
        conditions.append(f"({CONTAINS.format('groups.instance_id')} OR {CONTAINS.format('a.error_message')})")
        values += [like_pattern(page.search)] * 2
    return conditions, values


def _failed_attempt(job: JobRecord, row: sqlite3.Row, page: AttemptPageQuery) -> FailedAttempt:
    messages, traceback = decode_failed_attempt(row["messages"])
    position = {name: row[name] for name in ("epoch", "position", "slot", "attempt")}
    return FailedAttempt(
        uid=str(AttemptUid(job_key=job.key, **position)),
        group_index=row["group_key"],
        epoch=row["epoch"],
        instance_id=row["instance_id"],
        slot=row["slot"],
        attempt=row["attempt"],
        error_code=row["error_code"],
        error_message=row["error_message"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        traceback=traceback,
        has_transcript=bool(messages),
        messages=messages if messages and page.transcripts else None,
    )
