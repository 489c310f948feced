"""Looks up a job for a caller, and builds the policy of its groups."""

from __future__ import annotations

from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import ConflictError, NotFoundError
from slime_plugins.rollout_buffer.rules.groups import GroupPolicy
from slime_plugins.rollout_buffer.storage.tables import job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord


def find_job(connection: Connection, job_id: str) -> JobRecord:
    """Returns a job.

    Raises:
        NotFoundError: there is no job of that id.
    """
    job = job_rows.find_job(connection, job_id)
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:300]!r}; GET /jobs lists them")
    return job


def several_jobs(candidates: Sequence[JobRecord], what_they_are: str) -> ConflictError:
    """Returns the error for a request without a job id to which several jobs fit; ``what_they_are`` says why."""
    names = [job.job_id for job in candidates]
    return ConflictError(
        f"{len(names)} jobs {what_they_are}: select one with job_id ({', '.join(names[:10])})", {"jobs": names}
    )


def group_policy(job: JobRecord, generator_reward_range: tuple[float, float] | None = None) -> GroupPolicy:
    """Builds the policy that judges a job's groups; the job's reward range overrides that of its generator."""
    settings = job.settings
    return GroupPolicy(
        group_size=job.group_size,
        task_type=job.task_type,
        reward_range=settings.reward_range or generator_reward_range,
        evaluation=settings.evaluation,
        min_valid_group_size_ratio=settings.min_valid_group_size_ratio,
        min_valid_item_size_ratio=settings.min_valid_item_size_ratio,
        min_timeout_group_size_ratio=settings.min_timeout_group_size_ratio,
        normalize_rewards=settings.normalize_rewards,
        padding=settings.padding,
    )
