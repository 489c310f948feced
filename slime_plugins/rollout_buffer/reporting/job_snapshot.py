"""The state of a job at one moment, read from the store for ``diagnosis``."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.reporting.bias import closed_groups
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause, CauseCode, CountedCause
from slime_plugins.rollout_buffer.rules.heartbeats import DEVICES, ENGINE, SUPERVISOR
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES, FailedAttempts
from slime_plugins.rollout_buffer.rules.prompt_receipts import PromptCounts
from slime_plugins.rollout_buffer.rules.selection_bias import MissingMembers, SlowLoss, missing_members, slow_loss
from slime_plugins.rollout_buffer.rules.stuck_weights import StuckWeights
from slime_plugins.rollout_buffer.state.runner_reports import prompt_findings_of, report_of_job
from slime_plugins.rollout_buffer.state.staleness import admission_state, stuck_weights_of
from slime_plugins.rollout_buffer.storage.data_dir import RUNNER_LOG
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, group_rows, prompt_rows, service_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import AttemptState, EngineReport, EngineTrouble, GroupState, JobState

FAILURES_WITHIN_S = 600.0

_NO_REPORT = EngineReport()
_NO_PROMPTS = PromptCounts()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """The state of a job at one moment. Ages are in seconds; None means never, or unknown.

    ``devices`` has ``total`` and, if known, ``busy``, ``broken``, ``starting`` and ``waiting`` (episodes that wait for
    a device), or ``unreachable``, the reason; it is empty if unknown.
    """

    state: JobState
    job_id: str = "JOB"
    task_type: str = ""
    log: str = "DATA_DIR/logs"
    """The log file of the job's runner."""
    cause: Cause = NO_CAUSE
    has_runner: bool = True
    has_input: bool = True
    engine_url: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    supervisor_age_s: float | None = None
    began_s: float = 0.0
    """Seconds since the job was started or resumed, or its present runner began."""
    running_attempts: int = 0
    oldest_running_s: float | None = None
    trajectory_age_s: float | None = None
    recent_failures: Mapping[str, int] = field(default_factory=dict)
    """Failed attempts since the last start, of the last ten minutes, by error code, the most frequent first."""
    last_failure: str = ""
    """The message of the last failure with the most frequent code."""
    all_failed: FailedAttempts | None = None
    """How the job's attempts failed, if none of them ever returned a trajectory."""
    poll_age_s: float | None = None
    trainer_waits_s: float | None = None
    """How long a trainer has polled without a delivery; None if no trainer is waiting."""
    max_groups_ahead: int | None = None
    max_groups_ready: int | None = None
    pause_when_idle_s: float | None = None
    disk_free_bytes: int | None = None
    devices: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineReport = _NO_REPORT
    prompt_findings: Sequence[str] = ()
    """How the job's engine changes prompts, as predicates of "the engine"."""
    prompts: PromptCounts = _NO_PROMPTS
    most_frequent_causes: Mapping[GroupState, CountedCause] = field(default_factory=dict)
    """The most frequent cause of filtered and of failed groups."""
    stale_groups: int = 0
    """Groups that were dropped because their weights were too old."""
    max_weight_version_lag: int | None = None
    lag_reached: bool = False
    """The runner may begin no group, because it would exceed ``max_weight_version_lag`` when it is trained."""
    gives_up_slow_members: bool = False
    """The job has a runner, and ``group_timeout_seconds`` is set."""
    slow_loss: SlowLoss | None = None
    missing_members: MissingMembers | None = None
    stuck_weights: StuckWeights | None = None
    """Set if the trainer's or the engine's weight version does not change while groups are trained."""
    trainer_run: int = 1
    weight_version: int | None = None
    outlier_versions: int = 0
    """Number of reported weight versions that were implausibly high; ``outlier_version`` is the last."""
    outlier_version: int | None = None
    refused_items: int = 0
    """Number of refused items; ``last_refusal`` has status and reason of the last."""
    last_refusal: str = ""

    def count(self, *states: GroupState) -> int:
        """Counts groups in the states."""
        return sum(self.groups.get(state.value, 0) for state in states)


def take_snapshot(
    connection: Connection, job: JobRecord, groups: Mapping[str, int], now: float, data_dir: Path
) -> JobSnapshot:
    """Reads a job's snapshot in this transaction; ``groups`` counts its groups by state.

    For a job that has ended, attempts, devices and engine are not read.
    """
    beat = service_rows.heartbeat(connection, SUPERVISOR.name)
    closed = closed_groups(connection, job.key)
    without_activity = JobSnapshot(
        state=job.state,
        job_id=job.job_id,
        task_type=job.task_type,
        log=str(data_dir.absolute() / RUNNER_LOG.format(job.key)),
        cause=Cause(job.cause_code, job.cause),
        has_runner=job.has_runner,
        has_input=job.has_input,
        engine_url=redacted(job.engine_url or ""),
        groups=groups,
        supervisor_age_s=None if beat is None else abs(now - beat[0]),
        began_s=max(0.0, now - max(job.created_at, job.updated_at)),
        poll_age_s=_age(now, job.last_poll_at),
        max_groups_ahead=job.settings.max_groups_ahead,
        max_groups_ready=job.settings.max_groups_ready,
        pause_when_idle_s=job.settings.pause_when_idle_s,
        prompt_findings=prompt_findings_of(connection, job.key),
        prompts=prompt_rows.sums_of(connection, job.key) or _NO_PROMPTS,
        most_frequent_causes=group_rows.most_frequent_causes(connection, job.key),
        stale_groups=group_rows.count_with_cause(connection, job.key, GroupState.FILTERED, CauseCode.STALE),
        max_weight_version_lag=job.settings.max_weight_version_lag,
        gives_up_slow_members=job.gives_up_slow_members,
        slow_loss=slow_loss(closed),
        missing_members=missing_members(closed),
        trainer_run=job.trainer_run,
        weight_version=job.weight_version,
        outlier_versions=job.lone_versions,
        outlier_version=job.lone_version,
        refused_items=job.refused_items,
        last_refusal=job.last_refusal,
    )
    if job.state not in OPEN_STATES:
        return without_activity
    running, oldest = _running(connection, job.key)
    admission = admission_state(connection, now, job)
    failures, last_failure = _failures(connection, job.key, max(now - FAILURES_WITHIN_S, job.run_began_at or 0.0))
    return replace(
        without_activity,
        running_attempts=running,
        oldest_running_s=_age(now, oldest),
        trajectory_age_s=_age(now, _last_written(connection, job.key)),
        recent_failures=failures,
        last_failure=last_failure,
        all_failed=_all_failed(connection, job.key),
        lag_reached=not job.takes_items and admission is not None and admission.room == 0,
        trainer_waits_s=_age(now, job.waiting_since),
        disk_free_bytes=shutil.disk_usage(data_dir).free,
        devices=_devices(connection, job.key, now),
        engine=_engine(connection, job.key, now),
        stuck_weights=stuck_weights_of(connection, now, job),
    )


def _last_written(connection: Connection, job_key: int) -> float | None:
    query = (
        "SELECT created_at FROM trajectories INDEXED BY trajectories_to_look_at WHERE job_key = ? "
        "ORDER BY key DESC LIMIT 1"
    )
    row = connection.execute(query, (job_key,)).fetchone()
    return None if row is None else float(row[0])


def _running(connection: Connection, job_key: int) -> tuple[int, float | None]:
    query = (
        "SELECT count(*), min(started_at) FROM attempts INDEXED BY attempts_running "
        "JOIN groups ON groups.key = group_key WHERE attempts.state = 'running' AND job_key = ?"
    )
    row = connection.execute(query, (job_key,)).fetchone()
    return int(row[0]), row[1]


def _failures(connection: Connection, job_key: int, since: float) -> tuple[dict[str, int], str]:
    query = (
        "SELECT error_code, count(*), error_message, max(ended_at) FROM attempts INDEXED BY attempts_failed "
        "JOIN groups ON groups.key = group_key WHERE attempts.state = 'failed' AND ended_at >= ? AND job_key = ? "
        "GROUP BY error_code ORDER BY count(*) DESC, max(ended_at) DESC"
    )
    rows = connection.execute(query, (since, job_key)).fetchall()
    return {str(row[0]): int(row[1]) for row in rows}, str(rows[0][2] or "") if rows else ""


def _all_failed(connection: Connection, job_key: int) -> FailedAttempts | None:
    """Returns how attempts failed, if every attempt that ended has failed; None otherwise."""
    states = {state for state, _ in attempt_rows.attempts_by_error(connection, job_key)}
    if AttemptState.FINISHED in states or AttemptState.FAILED not in states:
        return None
    return attempt_rows.failed_attempts(connection, job_key)


def _engine(connection: Connection, job_key: int, now: float) -> EngineReport:
    """Returns the latest engine report of the runner or gateway, unless it is outdated."""
    beat = service_rows.heartbeat(connection, ENGINE.of_job(job_key))
    if beat is None or ENGINE.is_silent(abs(now - beat[0])):
        return EngineReport()
    engine = beat[1]["engine"]
    return EngineReport(**{**engine, "code": EngineTrouble(engine["code"])})


def _devices(connection: Connection, job_key: int, now: float) -> dict[str, Any]:
    """Counts the devices in the runner's latest report by state."""
    report = report_of_job(connection, job_key, now)
    if report is None or DEVICES.is_silent(report["age_s"]):
        return {}
    if why := report.get("unreachable"):
        return {"unreachable": why}
    states = Counter(str(device["state"]) for device in report["devices"])
    return {
        "total": sum(states.values()),
        "busy": states["leased"],
        "broken": states["quarantined"],
        "starting": states["preparing"] + states["booting"] + states["recycling"],
        "waiting": sum(report.get("episodes_waiting", {}).values()),
    }


def _age(now: float, time: float | None) -> float | None:
    return None if time is None else max(0.0, now - time)
