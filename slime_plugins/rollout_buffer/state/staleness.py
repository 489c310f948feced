"""How old the weights are that sampled a group, and what becomes of groups that are too old. On an open transaction."""

from __future__ import annotations

from collections.abc import Sequence

from slime_plugins.rollout_buffer.rules.causes import STALE
from slime_plugins.rollout_buffer.rules.weight_versions import Standing, standing_of, versions_of
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, group_rows, job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Generation, GroupState

__all__ = ["drop_stale_groups", "note_trainers_version", "note_versions", "stale_groups"]


def note_versions(
    connection: Connection, job_key: int, generations: Sequence[Generation], *, sampled_from: float | None = None
) -> dict[str, int | None]:
    """Returns the columns of a trajectory that tell the age of its weights; tells the job of the newest.

    ``sampled_from`` is when its attempt began, None when it is unknown.
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


def note_trainers_version(connection: Connection, job: JobRecord, version: int) -> JobRecord:
    """Notes what the trainer says of its weights and returns the job with it; most polls say nothing new."""
    if version == job.weight_version:
        return job
    if standing_of(version, job.known_versions()) is not Standing.ALONE:
        job_rows.note_weight_versions(connection, job.key, version, version)
    elif job.lone_version == version:
        return job
    else:
        job_rows.note_lone_version(connection, job.key, version)
    return job_rows.get_job(connection, job.key)


def stale_groups(connection: Connection, job: JobRecord) -> list[int]:
    """Groups sampled by weights that are too old; those of an earlier run are as old as the present one's first."""
    lag = job.settings.max_weight_version_lag
    if lag is None or job.weight_version is None or job.first_weight_version is None:
        return []
    oldest_allowed = job.weight_version - lag
    return delivery_rows.stale_ready_groups(
        connection, job.key, job.trainer_run, oldest_allowed, version_of_earlier_runs=job.first_weight_version
    )


def drop_stale_groups(connection: Connection, now: float, job: JobRecord) -> None:
    """Filters groups that waited for so long that training on them would be too far off policy."""
    for key in stale_groups(connection, job):
        delivery_key = group_rows.get_group(connection, key).delivery_key
        if delivery_key is not None:
            # The delivery it had come back from will not go out whole: what that reported is reported anew.
            delivery_rows.dissolve_delivery(connection, delivery_key)
        group_rows.update_group(connection, key, state=GroupState.FILTERED.value, closed_at=now, **STALE.columns())
