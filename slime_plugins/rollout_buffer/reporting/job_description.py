"""Describes a job for replies: its state, progress and accounting, and its stored settings."""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.credentials import redacted, redacted_values
from slime_plugins.rollout_buffer.reporting.bias import closed_groups
from slime_plugins.rollout_buffer.reporting.time_series import job_measures
from slime_plugins.rollout_buffer.rules.selection_bias import bias_table
from slime_plugins.rollout_buffer.state.runner_reports import prompt_findings_of
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    group_rows,
    job_rows,
    payload_rows,
    trajectory_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.wire.job_replies import Job, JobProgress


def job_progress(connection: Connection, job: JobRecord) -> JobProgress:
    """Returns a job's state and the numbers of its groups and slots by state."""
    groups = {state.value: count for state, count in group_rows.count_groups(connection, job.key).items()}
    slots = {state: count * job.group_size for state, count in groups.items()}
    return JobProgress(
        job_id=job.job_id,
        task_type=job.task_type,
        state=job.state,
        cause=job.cause,
        cause_code=job.cause_code,
        group_size=job.group_size,
        created_at=job.created_at,
        finished_at=job.finished_at,
        last_poll_at=job.last_poll_at,
        groups=groups,
        slots={"submitted": sum(slots.values()), **slots},
    )


def describe_job(store: Store, job: JobRecord) -> Job:
    """Returns a job's state, progress and accounting, from one snapshot. ``Job`` describes what each number counts."""
    with store.read() as connection:
        job = job_rows.get_job(connection, job.key)
        progress = job_progress(connection, job)
        attempts = attempt_rows.count_attempts(connection, job.key)
        outcomes = trajectory_rows.count_outcomes(connection, job.key)
        causes = group_rows.count_causes(connection, job.key)
        late = trajectory_rows.count_late(connection, job.key)
        damaged = payload_rows.count_damaged(connection, job.key)
        closed = closed_groups(connection, job.key)
        measures = job_measures(connection, job.key, closed)
        findings = prompt_findings_of(connection, job.key)
    return Job(
        **progress,
        engine_url=None if job.engine_url is None else redacted(job.engine_url),
        has_input=job.has_input,
        instances=job.instance_count,
        epochs=job.num_epoch,
        updated_at=job.updated_at,
        attempts=attempts,
        outcomes=outcomes,
        late=late,
        damaged=damaged,
        refused_items=job.refused_items,
        trainer_run=job.trainer_run,
        measures=measures,
        prompt_findings=findings,
        bias=bias_table(closed),
        causes=causes,
    )


def settings_for_display(store: Store, job: JobRecord) -> dict[str, Any]:
    """Returns what a job keeps of its start payload, settings and options, with secrets redacted."""
    with store.read() as connection:
        options = job_rows.options_of(connection, job.key)
    shown: dict[str, Any] = redacted_values({**job.settings.all_values, **options})
    return shown
