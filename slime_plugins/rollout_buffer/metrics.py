"""What ``GET /metrics`` says, in Prometheus' text format.

Every number is read from the store when it is asked for, so that it does not matter which gunicorn worker answers, and
a restart loses nothing. All are gauges: retention may take away what was counted. ``METRICS`` is the table of names.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slime_plugins.rollout_buffer.inspection import Inspection, JobCounts
from slime_plugins.rollout_buffer.store import Store

__all__ = ["METRICS", "MetricName", "cause_class", "metrics_page"]

JOB_LABELS = ("job_id", "task_type")
DELIVERY_STATES = ("leased", "acked", "popped", "expired")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricName:
    """One metric: its name, what it says, and by what it is told apart."""

    name: str
    says: str
    labels: tuple[str, ...] = ()


JOBS = MetricName(
    name="rollout_buffer_jobs",
    says="1 for each job, under the state it is in",
    labels=(*JOB_LABELS, "state"),
)
SLOTS_SUBMITTED = MetricName(
    name="rollout_buffer_slots_submitted",
    says="Slots of the job; always the sum of rollout_buffer_slots over its states",
    labels=JOB_LABELS,
)
SLOTS = MetricName(
    name="rollout_buffer_slots",
    says="Slots by state: open, ready, leased, delivered, filtered, failed, skipped",
    labels=(*JOB_LABELS, "state"),
)
GROUPS = MetricName(
    name="rollout_buffer_groups",
    says="Groups by state, as rollout_buffer_slots",
    labels=(*JOB_LABELS, "state"),
)
GROUP_CAUSES = MetricName(
    name="rollout_buffer_group_causes",
    says="Groups that were filtered or failed, by why; numbers in the cause are written N",
    labels=(*JOB_LABELS, "state", "cause"),
)
ATTEMPTS = MetricName(
    name="rollout_buffer_attempts",
    says="Attempts to fill a slot by state (running, finished, failed, given_up) and, when failed, by error code",
    labels=(*JOB_LABELS, "state", "error_code"),
)
TRAJECTORIES = MetricName(
    name="rollout_buffer_trajectories",
    says="Trajectories that count for a group, by outcome",
    labels=(*JOB_LABELS, "outcome"),
)
LATE = MetricName(
    name="rollout_buffer_trajectories_late",
    says="Trajectories that came after their group had closed; kept, never delivered",
    labels=JOB_LABELS,
)
DELIVERIES = MetricName(
    name="rollout_buffer_deliveries",
    says="Deliveries by state: leased, acked, popped (handed out for good), expired (came back)",
    labels=(*JOB_LABELS, "state"),
)
POLL_AGE = MetricName(
    name="rollout_buffer_poll_age_seconds",
    says="Seconds since a trainer last asked for the job's data, to within 5; absent when none ever did",
    labels=JOB_LABELS,
)
OLDEST_READY = MetricName(
    name="rollout_buffer_oldest_ready_group_age_seconds",
    says="Seconds that the longest waiting ready group has waited; 0 when none waits",
    labels=JOB_LABELS,
)
SUPERVISOR_AGE = MetricName(
    name="rollout_buffer_supervisor_heartbeat_age_seconds",
    says="Seconds since the supervisor said that it lives; absent when it never did or ended in order",
)
STORE_BYTES = MetricName(
    name="rollout_buffer_store_bytes",
    says="Bytes on disk by part: database, and each folder of the data directory",
    labels=("part",),
)
DISK_FREE = MetricName(
    name="rollout_buffer_disk_free_bytes",
    says="Bytes that are free on the disk of the data directory",
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
    DELIVERIES,
    POLL_AGE,
    OLDEST_READY,
    SUPERVISOR_AGE,
    STORE_BYTES,
    DISK_FREE,
)


def metrics_page(inspection: Inspection, supervisor: str) -> bytes:
    """Returns the text that Prometheus scrapes; ``supervisor`` is the name its heartbeat is stored under."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StoreCollector(inspection, supervisor))
    return generate_latest(registry)


class _StoreCollector(Collector):
    """Builds every metric from one look at the store."""

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
        families = {name: GaugeMetricFamily(name.name, name.says, labels=name.labels) for name in METRICS}
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
        yield ATTEMPTS, (*this, state, code), count
    for outcome, count in job.outcomes.items():
        yield TRAJECTORIES, (*this, outcome), count
    yield LATE, this, job.late
    for state in DELIVERY_STATES:
        yield DELIVERIES, (*this, state), job.deliveries.get(state, 0)
    if job.poll_age_s is not None:
        yield POLL_AGE, this, job.poll_age_s
    yield OLDEST_READY, this, job.oldest_ready_age_s


def cause_class(cause: str) -> str:
    """Returns a cause without what differs from group to group, so that there are few label values."""
    return re.sub(r"\d+", "N", cause.split(":")[0])[:80]


def _by_class(causes: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    summed: dict[tuple[str, str], int] = {}
    for (state, cause), count in causes.items():
        key = (state, cause_class(cause))
        summed[key] = summed.get(key, 0) + count
    return summed


def _samples_of_disk(store: Store) -> list[Sample]:
    database = sum(path.stat().st_size for path in store.data_dir.glob("buffer.sqlite3*"))
    folders = sorted(path for path in store.data_dir.iterdir() if path.is_dir())
    return [
        (STORE_BYTES, ("database",), database),
        *((STORE_BYTES, (folder.name,), _bytes_under(folder)) for folder in folders),
        (DISK_FREE, (), shutil.disk_usage(store.data_dir).free),
    ]


def _bytes_under(folder: Path) -> int:
    """Sums the sizes of the files in a folder and below; files that vanish meanwhile do not count."""
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += _bytes_under(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
            except FileNotFoundError:
                continue
    return total
