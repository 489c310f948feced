"""Changes and look-ups that more than one room makes inside a transaction."""

from __future__ import annotations

from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import ConflictError, NotFoundError
from slime_plugins.rollout_buffer.rules.groups import GroupPolicy
from slime_plugins.rollout_buffer.rules.weight_versions import Standing, standing_of, versions_of
from slime_plugins.rollout_buffer.storage.tables import job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Generation


def find_job(connection: Connection, job_id: str) -> JobRecord:
    """Returns a job.

    Raises:
        NotFoundError: there is none of that id.
    """
    job = job_rows.find_job(connection, job_id)
    if job is None:
        raise NotFoundError(f"there is no job {job_id[:300]!r}; GET /jobs lists them")
    return job


def several_jobs(candidates: Sequence[JobRecord]) -> ConflictError:
    """Returns what a caller is told that named no job while several are open."""
    names = [job.job_id for job in candidates]
    return ConflictError(
        f"{len(names)} jobs are open: say which with job_id ({', '.join(names[:10])})", {"jobs": names}
    )


def note_versions(
    connection: Connection, job_key: int, generations: Sequence[Generation], *, sampled_from: float | None = None
) -> dict[str, int | None]:
    """Returns the columns of a trajectory that tell the age of its weights; tells the job of the newest.

    ``sampled_from`` is when its attempt began, None when nobody told.
    """
    versions = versions_of(generations)
    if versions is None:
        return {"oldest_version": None, "versions_behind": None}
    oldest, newest = versions
    known = job_rows.known_versions(connection, job_key)
    columns = {"oldest_version": oldest, "versions_behind": None, "trainer_run": known.trainer_run}
    standing = standing_of(newest, known, sampled_from=sampled_from)
    if standing is Standing.OF_AN_EARLIER_RUN:
        return {**columns, "trainer_run": known.trainer_run - 1}
    if standing is Standing.ALONE:
        job_rows.note_lone_version(connection, job_key, newest)
        return columns
    return {**columns, "versions_behind": job_rows.note_weight_versions(connection, job_key, oldest, newest) - oldest}


def group_policy(job: JobRecord, reward_range: tuple[float, float] | None = None) -> GroupPolicy:
    """Builds what a job's groups are measured by; the payload's reward range comes before the generator's own."""
    settings = job.settings
    return GroupPolicy(
        group_size=job.group_size,
        task_type=job.task_type,
        reward_range=settings.reward_range or reward_range,
        evaluation=settings.evaluation,
        min_valid_group_size_ratio=settings.min_valid_group_size_ratio,
        min_valid_item_size_ratio=settings.min_valid_item_size_ratio,
        min_timeout_group_size_ratio=settings.min_timeout_group_size_ratio,
        normalize_rewards=settings.normalize_rewards,
        padding=settings.padding,
    )
