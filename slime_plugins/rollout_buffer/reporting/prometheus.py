"""Metrics of ``GET /metrics`` in Prometheus' text format.

All values are read from the store at each request, so any gunicorn worker may answer, and a restart loses nothing. All
metrics are gauges, because retention may delete what they count. ``METRICS`` is the table of names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slime_plugins.rollout_buffer.reporting.bias import closed_groups
from slime_plugins.rollout_buffer.reporting.time_series import job_measures
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.state.runner_reports import concurrency_of, recent_device_pools
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    group_rows,
    payload_rows,
    service_rows,
    trajectory_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord, all_jobs
from slime_plugins.rollout_buffer.types import DeliveryState

JOB_LABELS = ("job_id", "task_type")
DEVICE_LABELS = ("pool", "device_id")


class MetricName(NamedTuple):
    """One metric with its help text and its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


def _of_job(name: str, text: str, *labels: str) -> MetricName:
    return MetricName(name, text, (*JOB_LABELS, *labels))


def _of_device(name: str, text: str, *labels: str) -> MetricName:
    return MetricName(name, text, (*DEVICE_LABELS, *labels))


METRICS = (
    _of_job("rollout_buffer_jobs", "1 for each job, under the state it is in", "state"),
    _of_job(
        "rollout_buffer_slots_submitted", "Slots of the job; always the sum of rollout_buffer_slots over its states"
    ),
    _of_job(
        "rollout_buffer_slots", "Slots by state: open, ready, leased, delivered, filtered, failed, skipped", "state"
    ),
    _of_job("rollout_buffer_groups", "Groups by state, as rollout_buffer_slots", "state"),
    _of_job(
        "rollout_buffer_group_causes",
        "Groups that were filtered or failed, by cause; numbers in the cause are written N",
        "state",
        "cause",
    ),
    _of_job(
        "rollout_buffer_attempts",
        "Attempts to fill a slot by state (running, finished, failed, given_up) and, when failed, by error code",
        "state",
        "error_code",
    ),
    _of_job("rollout_buffer_trajectories", "Trajectories that count for a group, by outcome", "outcome"),
    _of_job(
        "rollout_buffer_trajectories_late", "Trajectories written after their group had closed; stored, never delivered"
    ),
    _of_job(
        "rollout_buffer_trajectories_damaged",
        "Trajectories whose payload could not be read when they were to be delivered",
    ),
    _of_job(
        "rollout_buffer_reward",
        "Reward of the job's trajectories as they were written, without late ones; by statistic: mean, min, max",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_success",
        "Share of trajectories that solved their task, of those that report success; statistic mean",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_staleness",
        "Weight versions between a trajectory's oldest token and the job's newest when it was written; by statistic: "
        "mean, max",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_episodes_at_once",
        "How many episodes the job may play at once: its num_process, or the present limit of auto",
    ),
    _of_job(
        "rollout_buffer_poll_wait_seconds",
        "Seconds that the trainer had polled for a delivery; by statistic: mean, max",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_log_prob_gap",
        "Distance of train and rollout log-prob over the tokens that the trainer reported; by statistic: mean, max",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_bias",
        "Distance of trained members from submitted ones in the newest finished groups; by statistic: duration, "
        "length, turns, reward, success, task (0 to 1), slowest, given_up, failed, dummies, reward_shift",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_prompts",
        "Turns by what the engine reported of the prompt that it ran; by statistic: checked (equal, differing), "
        "unknown, untrained, and of rows: forked, extra_tokens, row_tokens",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_forks",
        "Branches of closed sessions that began because a client asked again or sent another history; statistic sum",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_continued_turns",
        "Turns of sessions whose engine broke off its stream and that were continued; statistic sum",
        "statistic",
    ),
    _of_job(
        "rollout_buffer_deliveries",
        "Deliveries by state: leased, acked, popped (delivered without a lease), expired (lease ran out)",
        "state",
    ),
    _of_job(
        "rollout_buffer_poll_age_seconds",
        "Seconds since a trainer last polled the job, accurate to 5 seconds; absent when none ever did",
    ),
    _of_job(
        "rollout_buffer_oldest_ready_group_age_seconds",
        "Seconds that the longest waiting ready group has waited; 0 when none waits",
    ),
    MetricName(
        "rollout_buffer_supervisor_heartbeat_age_seconds",
        "Seconds since the supervisor's last heartbeat; absent without one and after the supervisor stopped normally",
    ),
    MetricName(
        "rollout_buffer_store_bytes",
        "Bytes on disk by part: database, and each folder of the data directory",
        ("part",),
    ),
    MetricName("rollout_buffer_disk_free_bytes", "Bytes that are free on the disk of the data directory"),
    _of_device(
        "rollout_buffer_devices",
        "1 for each device, under the state it is in: preparing, booting, ready, leased, checking, quarantined, "
        "recycling. Metrics of devices are absent for pools that no running job reported in the last minute",
        "state",
    ),
    _of_device("rollout_buffer_device_episodes", "Episodes that the device was lent to since its pool was created"),
    _of_device("rollout_buffer_device_steps", "Actions executed on the device"),
    _of_device(
        "rollout_buffer_device_failures",
        "Failures of the device, by kind: hung, died, device, environment_setup, refused, not_restored, "
        "boot_failed, lease_expired",
        "kind",
    ),
    _of_device(
        "rollout_buffer_device_health_actions",
        "How often the device was taken out of use, by action: quarantine, replacement, recycling",
        "action",
    ),
    _of_device(
        "rollout_buffer_device_reset_seconds",
        "Time to set up a task, of the last thousand; by quantile, 0.5 and 0.95",
        "quantile",
    ),
    _of_device(
        "rollout_buffer_device_step_seconds",
        "Time of an action until its screen has settled, of the last thousand; by quantile, 0.5 and 0.95",
        "quantile",
    ),
    _of_device(
        "rollout_buffer_device_actions_per_minute",
        "Actions per minute while the device was lent, over its last hundred episodes",
    ),
    MetricName(
        "rollout_buffer_device_runners_waiting",
        "Runners that wait for a device, by purpose: training, evaluation",
        ("pool", "purpose"),
    ),
)


def metrics_page(store: Store) -> bytes:
    """Returns the body of the reply."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StoreCollector(store))
    return generate_latest(registry)


class _StoreCollector(Collector):
    """Reads all jobs in one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = self._store.clock()
        with self._store.read() as connection:
            samples = [sample for job in all_jobs(connection) for sample in _samples_of(connection, job, now)]
            beat = service_rows.heartbeat(connection, SUPERVISOR.name)
        if beat is not None:
            samples.append(("rollout_buffer_supervisor_heartbeat_age_seconds", (), max(0.0, now - beat[0])))
        samples += _samples_of_disk(self._store)
        for report in recent_device_pools(self._store).values():
            samples += _samples_of_pool(report)
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, text, labels in METRICS}
        for name, labels, value in samples:
            families[name].add_metric(labels, value)
        return families.values()


Sample = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, value."""

_CAUSES = (
    "SELECT state, cause, count(*) FROM groups WHERE job_key = ? AND state IN ('filtered', 'failed') "
    "GROUP BY state, cause"
)
_DELIVERIES = "SELECT state, count(*) FROM deliveries WHERE job_key = ? GROUP BY state"
_OLDEST_READY = "SELECT min(closed_at) FROM groups WHERE job_key = ? AND state = 'ready'"


def _samples_of(connection: Connection, job: JobRecord, now: float) -> Iterator[Sample]:
    labels = (job.job_id, job.task_type)
    groups = group_rows.count_groups(connection, job.key)
    yield "rollout_buffer_jobs", (*labels, job.state.value), 1
    yield "rollout_buffer_slots_submitted", labels, sum(groups.values()) * job.group_size
    for state, count in groups.items():
        yield "rollout_buffer_slots", (*labels, state.value), count * job.group_size
        yield "rollout_buffer_groups", (*labels, state.value), count
    for (closed_as, cause), count in _by_class(connection.execute(_CAUSES, (job.key,))).items():
        yield "rollout_buffer_group_causes", (*labels, closed_as, cause), count
    for (attempt_state, code), count in attempt_rows.attempts_by_error(connection, job.key).items():
        yield "rollout_buffer_attempts", (*labels, attempt_state.value, code), count
    for outcome, count in trajectory_rows.count_outcomes(connection, job.key).items():
        yield "rollout_buffer_trajectories", (*labels, outcome), count
    yield "rollout_buffer_trajectories_late", labels, trajectory_rows.count_late(connection, job.key)
    yield "rollout_buffer_trajectories_damaged", labels, payload_rows.count_damaged(connection, job.key)
    for measured, statistics in job_measures(connection, job.key, closed_groups(connection, job.key)).items():
        for statistic, value in statistics.items():
            yield f"rollout_buffer_{measured}", (*labels, statistic), value
    deliveries = dict(connection.execute(_DELIVERIES, (job.key,)).fetchall())
    for delivered in DeliveryState:
        yield "rollout_buffer_deliveries", (*labels, delivered.value), deliveries.get(delivered.value, 0)
    if job.last_poll_at is not None:
        yield "rollout_buffer_poll_age_seconds", labels, max(0.0, now - job.last_poll_at)
    (oldest,) = connection.execute(_OLDEST_READY, (job.key,)).fetchone()
    yield "rollout_buffer_oldest_ready_group_age_seconds", labels, 0.0 if oldest is None else max(0.0, now - oldest)
    if (limit := concurrency_of(connection, job, now).get("limit")) is not None:
        yield "rollout_buffer_episodes_at_once", labels, limit


def cause_class(cause: str) -> str:
    """Returns a cause with its numbers replaced by N, so that there are few label values."""
    return re.sub(r"\d+", "N", re.split(r":| \(", cause)[0])[:80]


def _by_class(causes: Iterable[tuple[str, str, int]]) -> Counter[tuple[str, str]]:
    summed: Counter[tuple[str, str]] = Counter()
    for state, cause, count in causes:
        summed[state, cause_class(cause)] += count
    return summed


def _samples_of_pool(report: Mapping[str, Any]) -> Iterator[Sample]:
    for device in report["devices"]:
        yield from _samples_of_device((str(report["pool"]), str(device["device_id"])), device)
    for purpose, count in report.get("runners_waiting", {}).items():
        yield "rollout_buffer_device_runners_waiting", (str(report["pool"]), purpose), count


def _samples_of_device(labels: tuple[str, str], device: Mapping[str, Any]) -> Iterator[Sample]:
    yield "rollout_buffer_devices", (*labels, device["state"]), 1
    yield "rollout_buffer_device_episodes", labels, device["episodes"]
    yield "rollout_buffer_device_steps", labels, device["steps"]
    for kind, count in device["failures"].items():
        yield "rollout_buffer_device_failures", (*labels, kind), count
    for action in ("quarantine", "replacement", "recycling"):
        yield "rollout_buffer_device_health_actions", (*labels, action), device[f"{action}s"]
    for phase in ("reset", "step"):
        for quantile, suffix in (("0.5", "p50"), ("0.95", "p95")):
            if (seconds := device[f"{phase}_s_{suffix}"]) is not None:
                yield f"rollout_buffer_device_{phase}_seconds", (*labels, quantile), seconds
    if device["actions_per_minute"] is not None:
        yield "rollout_buffer_device_actions_per_minute", labels, device["actions_per_minute"]


def _samples_of_disk(store: Store) -> list[Sample]:
    database = sum(path.stat().st_size for path in store.data_dir.glob("buffer.sqlite3*"))
    folders = sorted(path for path in store.data_dir.iterdir() if path.is_dir())
    return [
        ("rollout_buffer_store_bytes", ("database",), database),
        *(("rollout_buffer_store_bytes", (folder.name,), _bytes_under(folder)) for folder in folders),
        ("rollout_buffer_disk_free_bytes", (), shutil.disk_usage(store.data_dir).free),
    ]


def _bytes_under(folder: Path) -> int:
    """Returns the total size of files below a folder; skips files that vanish."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += _bytes_under(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
            except FileNotFoundError:
                continue
    return total
