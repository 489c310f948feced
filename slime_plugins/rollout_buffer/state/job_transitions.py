"""Puts a job into another state; ``rules/job_states`` has the allowed transitions."""

from __future__ import annotations

from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, delivery_rows, group_rows, job_rows, plan_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState, JobState


def set_state(connection: Connection, now: float, job: JobRecord, state: JobState, cause: Cause = NO_CAUSE) -> None:
    """Pauses or resumes a job; the group timeouts of a resumed job begin again."""
    if job.state is JobState.PAUSED and state is JobState.RUNNING:
        group_rows.restart_group_clocks(connection, job.key, now)
    job_rows.update_job(connection, job.key, state=state.value, updated_at=now, **cause.columns())


def end_job(connection: Connection, now: float, job_key: int, state: JobState, cause: Cause) -> None:
    """Puts a job into a final state and gives up its running attempts. Open groups stay open for a later start."""
    attempt_rows.give_up_running_attempts(connection, job_key, now)
    job_rows.update_job(connection, job_key, state=state.value, updated_at=now, finished_at=now, **cause.columns())


def cancel_job(connection: Connection, now: float, job_key: int, cause: Cause) -> None:
    """Cancels a job and skips its open groups."""
    group_rows.move_groups(connection, job_key, GroupState.OPEN, GroupState.SKIPPED, cause)
    plan_rows.skip_unopened(connection, job_key)
    end_job(connection, now, job_key, JobState.CANCELLED, cause)


def reopen_finished_job(connection: Connection, now: float, job_key: int) -> None:
    """Sets a finished job to running if it has open groups."""
    job = job_rows.get_job(connection, job_key)
    if job.state is JobState.FINISHED and delivery_rows.has_groups(connection, job_key, GroupState.OPEN):
        job_rows.update_job(connection, job_key, state=JobState.RUNNING.value, updated_at=now, finished_at=None)
