"""Staleness of groups: records weight versions, admits groups within the lag, and drops stale groups.

``buffer.py`` opens the transaction. The inputs of ``rules/admission.py`` are read from the database each time, so that
the runner that begins groups and the servers that deliver them decide by the same data, also after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slime_plugins.rollout_buffer.rules.admission import (
    GroupsAhead,
    Pace,
    VersionSeen,
    pace_of,
    room_for_groups,
    should_wait_for_slow_groups,
    version_at,
)
from slime_plugins.rollout_buffer.rules.causes import STALE
from slime_plugins.rollout_buffer.rules.stuck_weights import MAX_EPISODES, StuckWeights, stuck_weights
from slime_plugins.rollout_buffer.rules.weight_versions import VersionOrigin, origin_of, versions_of
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, group_rows, job_rows, staleness_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Generation, GroupState, JobState

STEP_S = 30.0
"""A trainer that does not poll for this long, and then polls again, counts as having trained a step."""


def note_versions(
    connection: Connection, job_key: int, generations: Sequence[Generation], *, attempt_began_at: float | None = None
) -> dict[str, int | None]:
    """Returns a trajectory's columns on weight versions, and records the newest version in its job.

    ``attempt_began_at`` is None if unknown.
    """
    versions = versions_of(generations)
    if versions is None:
        return {"oldest_version": None, "versions_behind": None}
    oldest, newest = versions
    known = job_rows.known_versions(connection, job_key)
    columns = {"oldest_version": oldest, "versions_behind": None, "trainer_run": known.trainer_run}
    origin = origin_of(newest, known, attempt_began_at=attempt_began_at)
    if origin is VersionOrigin.OF_AN_EARLIER_RUN:
        return {**columns, "trainer_run": known.trainer_run - 1}
    if origin is VersionOrigin.OUTLIER:
        job_rows.note_outlier_version(connection, job_key, newest)
        return columns
    return {**columns, "versions_behind": job_rows.note_weight_versions(connection, job_key, oldest, newest) - oldest}


def note_trainers_version(connection: Connection, job: JobRecord, version: int) -> JobRecord:
    """Records the weight version of a trainer's poll and returns the updated job."""
    if version == job.weight_version:
        return job
    if origin_of(version, job.known_versions()) is not VersionOrigin.OUTLIER:
        job_rows.note_weight_versions(connection, job.key, version, version)
    elif job.lone_version == version:
        return job  # this outlier is counted already
    else:
        job_rows.note_outlier_version(connection, job.key, version)
    return job_rows.get_job(connection, job.key)


def stale_groups(connection: Connection, job: JobRecord) -> list[int]:
    """Returns the keys of ready groups beyond the lag.

    Versions of an earlier run of the trainer count as the first version of its present run.
    """
    lag = job.settings.max_weight_version_lag
    if lag is None or job.weight_version is None or job.first_weight_version is None:
        return []
    oldest_allowed = job.weight_version - lag
    return staleness_rows.stale_ready_groups(
        connection, job.key, job.trainer_run, oldest_allowed, version_of_earlier_runs=job.first_weight_version
    )


def drop_stale_groups(connection: Connection, now: float, job: JobRecord) -> None:
    """Filters ready groups beyond the lag."""
    for key in stale_groups(connection, job):
        delivery_key = group_rows.get_group(connection, key).delivery_key
        if delivery_key is not None:
            # Its expired delivery cannot be redelivered whole. The filtered groups that it named in finished_groups
            # are named again by a later delivery.
            delivery_rows.dissolve_delivery(connection, delivery_key)
        group_rows.update_group(connection, key, state=GroupState.FILTERED.value, closed_at=now, **STALE.columns())


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionState:
    """The inputs of admission for a group that would begin now."""

    lag: int
    pace: Pace
    ahead: GroupsAhead

    @property
    def room(self) -> int | None:
        """Number of groups that may begin; None is unlimited."""
        return room_for_groups(self.lag, self.pace, self.ahead)


def policy_of(job: JobRecord) -> str:
    """Returns the staleness policy of a job: its setting, or else ``admit`` for jobs with a runner.

    External programs write items when they want: ``drop`` is the default for them.
    """
    return job.settings.staleness_policy or ("drop" if job.takes_items else "admit")


def admits(job: JobRecord) -> bool:
    """Returns True if a job begins groups only while they can be trained within its lag."""
    return job.settings.max_weight_version_lag is not None and policy_of(job) == "admit" and not job.settings.evaluation


def admission_state(
    connection: Connection, now: float, job: JobRecord, *, running: int | None = None
) -> AdmissionState | None:
    """Returns the admission state of a job; None if the job does not admit by lag, or no version is known.

    ``running`` is the caller's count of running groups; by default the store's count.
    """
    lag = job.settings.max_weight_version_lag
    if lag is None or job.weight_version is None or not admits(job):
        return None
    return _admission_state(connection, job, lag, _versions_seen(connection, now, job), running)


def waits_for_stragglers(connection: Connection, now: float, job: JobRecord) -> bool:
    """Returns True if a poll must wait for a running group that would be too old after the next step."""
    lag = job.settings.max_weight_version_lag
    if not lag or job.weight_version is None or not admits(job) or job.state is not JobState.RUNNING:
        return False
    oldest_began_at = staleness_rows.oldest_running_since(connection, job.key)
    if oldest_began_at is None:
        return False
    seen = _versions_seen(connection, now, job)
    version = version_at(seen, oldest_began_at)
    state = _admission_state(connection, job, lag, seen, None)
    return should_wait_for_slow_groups(
        lag,
        state.pace,
        state.ahead,
        oldest_is_behind=None if version is None else job.weight_version - version,
        waited_s=0.0 if job.waiting_since is None else now - job.waiting_since,
    )


def _admission_state(
    connection: Connection, job: JobRecord, lag: int, seen: Sequence[VersionSeen], running: int | None
) -> AdmissionState:
    taken = seen[-1].groups if seen and seen[-1].version == job.weight_version else 0
    ahead = GroupsAhead(
        taken=taken,
        ready=delivery_rows.count_ready_and_leased(connection, job.key)[0],
        running=group_rows.count_started(connection, job.key) if running is None else running,
        trainer_waits=job.waiting_since is not None,
    )
    return AdmissionState(lag=lag, pace=pace_of(seen), ahead=ahead)


def stuck_weights_of(connection: Connection, now: float, job: JobRecord) -> StuckWeights | None:
    """Returns whose weight version (engine, trainer) does not change while the job is trained; None if both change."""
    if job.settings.evaluation:
        return None
    deliveries = staleness_rows.newest_deliveries(connection, job.key, job.run_began_at or 0.0)
    newest = staleness_rows.newest_episodes(connection, job.key, job.trainer_run, MAX_EPISODES)
    steps = sum(
        later.delivered_at - later.waited_s - earlier.delivered_at >= STEP_S for earlier, later in pairwise(deliveries)
    )
    return stuck_weights(job.settings.max_weight_version_lag, _versions_seen(connection, now, job), newest, steps=steps)


def _versions_seen(connection: Connection, now: float, job: JobRecord) -> list[VersionSeen]:
    """Returns the weight versions of the trainer's present run, oldest first, as its deliveries show them."""
    seen: list[VersionSeen] = []
    for delivery in staleness_rows.newest_deliveries(connection, job.key, job.run_began_at or 0.0):
        delivered_at, version, groups = delivery.delivered_at, delivery.version, delivery.group_count
        if seen and version <= seen[-1].version:
            seen[-1] = replace(seen[-1], last_taken_at=delivered_at, groups=seen[-1].groups + groups)
        else:
            since = delivered_at - delivery.waited_s
            seen.append(VersionSeen(version=version, since=since, last_taken_at=delivered_at, groups=groups))
    newest = job.weight_version
    if newest is not None and seen and newest > seen[-1].version:
        since = now if job.waiting_since is None else job.waiting_since
        seen.append(VersionSeen(version=newest, since=since, last_taken_at=since, groups=0))
    return seen
