"""Metrics of ``GET /metrics`` in Prometheus' text format.

All values are read from the store at each request, so any gunicorn worker may answer, and a restart loses nothing. All
are gauges, since retention may delete what was counted. ``METRICS`` is the table of names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slime_plugins.rollout_buffer.reporting.inspection import Inspection, JobCounts
from slime_plugins.rollout_buffer.state.runner_reports import recent_device_pools
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import DeliveryState

JOB_LABELS = ("job_id", "task_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricName:
    """One metric with its help text and its labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()


JOBS = MetricName(
    name="rollout_buffer_jobs",
    help="1 for each job, under the state it is in",
    labels=(*JOB_LABELS, "state"),
)
SLOTS_SUBMITTED = MetricName(
    name="rollout_buffer_slots_submitted",
    help="Slots of the job; always the sum of rollout_buffer_slots over its states",
    labels=JOB_LABELS,
)
SLOTS = MetricName(
    name="rollout_buffer_slots",
    help="Slots by state: open, ready, leased, delivered, filtered, failed, skipped",
    labels=(*JOB_LABELS, "state"),
)
GROUPS = MetricName(
    name="rollout_buffer_groups",
    help="Groups by state, as rollout_buffer_slots",
    labels=(*JOB_LABELS, "state"),
)
GROUP_CAUSES = MetricName(
    name="rollout_buffer_group_causes",
    help="Groups that were filtered or failed, by cause; numbers in the cause are written N",
    labels=(*JOB_LABELS, "state", "cause"),
)
ATTEMPTS = MetricName(
    name="rollout_buffer_attempts",
    help="Attempts to fill a slot by state (running, finished, failed, given_up) and, when failed, by error code",
    labels=(*JOB_LABELS, "state", "error_code"),
)
TRAJECTORIES = MetricName(
    name="rollout_buffer_trajectories",
    help="Trajectories that count for a group, by outcome",
    labels=(*JOB_LABELS, "outcome"),
)
LATE = MetricName(
    name="rollout_buffer_trajectories_late",
    help="Trajectories written after their group had closed; stored, never delivered",
    labels=JOB_LABELS,
)
DAMAGED = MetricName(
    name="rollout_buffer_trajectories_damaged",
    help="Trajectories whose payload could not be read when they were to be delivered",
    labels=JOB_LABELS,
)
REWARD = MetricName(
    name="rollout_buffer_reward",
    help="Reward of the job's trajectories as they were written, without late ones; by statistic: mean, min, max",
    labels=(*JOB_LABELS, "statistic"),
)
LOG_PROB_GAP = MetricName(
    name="rollout_buffer_log_prob_gap",
    help="Distance of train and rollout log-prob over the tokens that the trainer reported; by statistic: mean, max",
    labels=(*JOB_LABELS, "statistic"),
)
BIAS = MetricName(
    name="rollout_buffer_bias",
    help="Distance of trained members from submitted ones in the newest finished groups; by statistic: duration, "
    "length, turns, reward, success, task (0 to 1), slowest, given_up, failed, dummies, reward_shift",
    labels=(*JOB_LABELS, "statistic"),
)
PROMPTS = MetricName(
    name="rollout_buffer_prompts",
    help="Turns by what the engine reported of the prompt that it ran; by statistic: checked (equal, differing), "
    "unknown, untrained, and of rows: forked, extra_tokens, row_tokens",
    labels=(*JOB_LABELS, "statistic"),
)
SUCCESS = MetricName(
    name="rollout_buffer_success",
    help="Share of trajectories that solved their task, of those that report success; statistic mean",
    labels=(*JOB_LABELS, "statistic"),
)
STALENESS = MetricName(
    name="rollout_buffer_staleness",
    help="Weight versions between a trajectory's oldest token and the job's newest when it was written; by statistic: "
    "mean, max",
    labels=(*JOB_LABELS, "statistic"),
)
EPISODES_AT_ONCE = MetricName(
    name="rollout_buffer_episodes_at_once",
    help="How many episodes the job may play at once: its num_process, or the present limit of auto",
    labels=JOB_LABELS,
)
POLL_WAIT = MetricName(
    name="rollout_buffer_poll_wait_seconds",
    help="Seconds that the trainer had polled for a delivery; by statistic: mean, max",
    labels=(*JOB_LABELS, "statistic"),
)
DELIVERIES = MetricName(
    name="rollout_buffer_deliveries",
    help="Deliveries by state: leased, acked, popped (delivered without a lease), expired (lease ran out)",
    labels=(*JOB_LABELS, "state"),
)
POLL_AGE = MetricName(
    name="rollout_buffer_poll_age_seconds",
    help="Seconds since a trainer last polled the job, to within 5; absent when none ever did",
    labels=JOB_LABELS,
)
OLDEST_READY = MetricName(
    name="rollout_buffer_oldest_ready_group_age_seconds",
    help="Seconds that the longest waiting ready group has waited; 0 when none waits",
    labels=JOB_LABELS,
)
SUPERVISOR_AGE = MetricName(
    name="rollout_buffer_supervisor_heartbeat_age_seconds",
    help="Seconds since the supervisor's last heartbeat; absent when there was none or the supervisor stopped in order",
)
STORE_BYTES = MetricName(
    name="rollout_buffer_store_bytes",
    help="Bytes on disk by part: database, and each folder of the data directory",
    labels=("part",),
)
DISK_FREE = MetricName(
    name="rollout_buffer_disk_free_bytes",
    help="Bytes that are free on the disk of the data directory",
)

DEVICE_LABELS = ("pool", "device_id")
DEVICES = MetricName(
    name="rollout_buffer_devices",
    help="1 for each device, under the state it is in: preparing, booting, ready, leased, checking, quarantined, "
    "recycling. Metrics of devices are absent for pools that no running job reported in the last minute",
    labels=(*DEVICE_LABELS, "state"),
)
DEVICE_EPISODES = MetricName(
    name="rollout_buffer_device_episodes",
    help="Episodes that were lent the device since its pool exists",
    labels=DEVICE_LABELS,
)
DEVICE_STEPS = MetricName(
    name="rollout_buffer_device_steps",
    help="Actions executed on the device",
    labels=DEVICE_LABELS,
)
DEVICE_FAILURES = MetricName(
    name="rollout_buffer_device_failures",
    help="Failures of the device, by kind: hung, died, device, environment_setup, refused, not_restored, "
    "boot_failed, lease_expired",
    labels=(*DEVICE_LABELS, "kind"),
)
DEVICE_HEALTH_ACTIONS = MetricName(
    name="rollout_buffer_device_health_actions",
    help="How often the device was taken out of use, by action: quarantine, replacement, recycling",
    labels=(*DEVICE_LABELS, "action"),
)
DEVICE_RESET = MetricName(
    name="rollout_buffer_device_reset_seconds",
    help="Time to set up a task, of the last thousand; by quantile, 0.5 and 0.95",
    labels=(*DEVICE_LABELS, "quantile"),
)
DEVICE_STEP = MetricName(
    name="rollout_buffer_device_step_seconds",
    help="Time of an action until its screen has settled, of the last thousand; by quantile, 0.5 and 0.95",
    labels=(*DEVICE_LABELS, "quantile"),
)
DEVICE_PACE = MetricName(
    name="rollout_buffer_device_actions_per_minute",
    help="Actions per minute while the device was lent, over its last hundred episodes",
    labels=DEVICE_LABELS,
)
DEVICE_WAITING = MetricName(
    name="rollout_buffer_device_runners_waiting",
    help="Runners that wait for a device, by purpose: training, evaluation",
    labels=("pool", "purpose"),
)

METRICS: tuple[MetricName, ...] = (
    JOBS,
    SLOTS_SUBMITTED,
    SLOTS,
    GROUPS,
    GROUP_CAUSES,
    ATTEMPTS,
    TRAJECTORIES,
    LATE,
    DAMAGED,
    REWARD,
    SUCCESS,
    STALENESS,
    EPISODES_AT_ONCE,
    POLL_WAIT,
    LOG_PROB_GAP,
    BIAS,
    PROMPTS,
    DELIVERIES,
    POLL_AGE,
    OLDEST_READY,
    SUPERVISOR_AGE,
    STORE_BYTES,
    DISK_FREE,
    DEVICES,
    DEVICE_EPISODES,
    DEVICE_STEPS,
    DEVICE_FAILURES,
    DEVICE_HEALTH_ACTIONS,
    DEVICE_RESET,
    DEVICE_STEP,
    DEVICE_PACE,
    DEVICE_WAITING,
)


_MEASURED = (REWARD, SUCCESS, STALENESS, POLL_WAIT, LOG_PROB_GAP, BIAS, PROMPTS)
MEASURES = {metric.name.removeprefix("rollout_buffer_"): metric for metric in _MEASURED}


def metrics_page(inspection: Inspection, supervisor: str) -> bytes:
    """Returns the page; ``supervisor`` is the name of its heartbeat in the store."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StoreCollector(inspection, supervisor))
    return generate_latest(registry)


class _StoreCollector(Collector):
    """Reads all metrics in one transaction."""

    def __init__(self, inspection: Inspection, supervisor: str) -> None:
        self._inspection = inspection
        self._supervisor = supervisor

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        counts = self._inspection.counts(self._supervisor)
        samples = [sample for job in counts.jobs for sample in _samples_of(job)]
        if counts.supervisor_age_s is not None:
            samples.append((SUPERVISOR_AGE, (), counts.supervisor_age_s))
        samples += _samples_of_disk(self._inspection.store)
        for farm in recent_device_pools(self._inspection.store).values():
            samples += _samples_of_farm(farm)
        families = {name: GaugeMetricFamily(name.name, name.help, labels=name.labels) for name in METRICS}
        for name, labels, value in samples:
            families[name].add_metric(labels, value)
        return families.values()


Sample = tuple[MetricName, tuple[str, ...], float]


def _samples_of(job: JobCounts) -> Iterator[Sample]:
    this = (job.job_id, job.task_type)
    yield JOBS, (*this, job.state), 1
    yield SLOTS_SUBMITTED, this, sum(job.groups.values()) * job.group_size
    for state, count in job.groups.items():
        yield SLOTS, (*this, state), count * job.group_size
        yield GROUPS, (*this, state), count
    for (state, cause), count in _by_class(job.causes).items():
        yield GROUP_CAUSES, (*this, state, cause), count
    for (state, code), count in job.attempts.items():
        yield ATTEMPTS, (*this, state.value, code), count
    for outcome, count in job.outcomes.items():
        yield TRAJECTORIES, (*this, outcome), count
    yield LATE, this, job.late
    yield DAMAGED, this, job.damaged
    for measured, statistics in job.measures.items():
        for statistic, value in statistics.items():
            yield MEASURES[measured], (*this, statistic), value
    for state in DeliveryState:
        yield DELIVERIES, (*this, state.value), job.deliveries.get(state.value, 0)
    if job.poll_age_s is not None:
        yield POLL_AGE, this, job.poll_age_s
    yield OLDEST_READY, this, job.oldest_ready_age_s
    if job.episodes_at_once is not None:
        yield EPISODES_AT_ONCE, this, job.episodes_at_once


def cause_class(cause: str) -> str:
    """Returns a cause with its numbers replaced by N, so that there are few label values."""
    return re.sub(r"\d+", "N", re.split(r":| \(", cause)[0])[:80]


def _by_class(causes: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    summed: dict[tuple[str, str], int] = {}
    for (state, cause), count in causes.items():
        key = (state, cause_class(cause))
        summed[key] = summed.get(key, 0) + count
    return summed


def _samples_of_farm(farm: Mapping[str, Any]) -> Iterator[Sample]:
    for device in farm["devices"]:
        yield from _samples_of_device((str(farm["pool"]), str(device["device_id"])), device)
    for purpose, count in farm.get("runners_waiting", {}).items():
        yield DEVICE_WAITING, (str(farm["pool"]), purpose), count


def _samples_of_device(this: tuple[str, str], device: Mapping[str, Any]) -> Iterator[Sample]:
    yield DEVICES, (*this, device["state"]), 1
    yield DEVICE_EPISODES, this, device["episodes"]
    yield DEVICE_STEPS, this, device["steps"]
    for kind, count in device["failures"].items():
        yield DEVICE_FAILURES, (*this, kind), count
    for action, counted in (
        ("quarantine", "quarantines"),
        ("replacement", "replacements"),
        ("recycling", "recyclings"),
    ):
        yield DEVICE_HEALTH_ACTIONS, (*this, action), device[counted]
    for metric, measured in ((DEVICE_RESET, "reset_s"), (DEVICE_STEP, "step_s")):
        for quantile, suffix in (("0.5", "p50"), ("0.95", "p95")):
            if device[f"{measured}_{suffix}"] is not None:
                yield metric, (*this, quantile), device[f"{measured}_{suffix}"]
    if device["actions_per_minute"] is not None:
        yield DEVICE_PACE, this, device["actions_per_minute"]


def _samples_of_disk(store: Store) -> list[Sample]:
    database = sum(path.stat().st_size for path in store.data_dir.glob("buffer.sqlite3*"))
    folders = sorted(path for path in store.data_dir.iterdir() if path.is_dir())
    return [
        (STORE_BYTES, ("database",), database),
        *((STORE_BYTES, (folder.name,), _bytes_under(folder)) for folder in folders),
        (DISK_FREE, (), shutil.disk_usage(store.data_dir).free),
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
