"""Reports of a job's runner on devices, its concurrency limit and prompts, stored as heartbeats for the server.

A runner overwrites its report every few seconds. Several jobs that share a device pool report the same devices; the
newest report counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slime_plugins.rollout_buffer.rules.heartbeats import CONCURRENCY, DEVICES, PROMPTS
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import service_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord

_MAX_AGE_S = 7 * 24 * 3600.0
"""Reports that are older are deleted."""


class _Device(BaseModel):
    """The known fields of a device; further fields are stored as well."""

    model_config = ConfigDict(extra="allow")

    device_id: str
    state: str
    last_error: str = ""
    episodes: int = 0
    steps: int = 0
    replacements: int = 0
    recyclings: int = 0
    quarantines: int = 0
    failures: dict[str, int] = Field(default_factory=dict)
    reset_s_p50: float | None = None
    reset_s_p95: float | None = None
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    actions_per_minute: float | None = None


class _DevicePool(BaseModel):
    model_config = ConfigDict(extra="allow")

    pool: str
    runners_waiting: dict[str, int] = Field(default_factory=dict)
    devices: list[_Device]


def store_report(store: Store, job_key: int, pid: int, pool: Mapping[str, Any], *, now: float | None = None) -> None:
    """Stores a runner's report on its device pool in place of its last report, and deletes old reports.

    Raises:
        ValueError: the report is invalid.
    """
    report = _DevicePool.model_validate(pool).model_dump(mode="json")
    now = store.clock() if now is None else now
    with store.write() as connection:
        service_rows.beat(connection, DEVICES.of_job(job_key), pid, now, report)
        service_rows.remove_before(connection, DEVICES.name, now - _MAX_AGE_S)


def devices_of_job(store: Store, job_key: int) -> dict[str, Any] | None:
    """Returns the job's last report with its ``age_s``; None if there is none."""
    with store.read() as connection:
        return report_of_job(connection, job_key, store.clock())


def report_of_job(connection: Connection, job_key: int, now: float) -> dict[str, Any] | None:
    """As ``devices_of_job``, on an open transaction."""
    heartbeat = service_rows.heartbeat(connection, DEVICES.of_job(job_key))
    return None if heartbeat is None else _with_age(heartbeat, now)


def recent_device_pools(store: Store) -> dict[str, dict[str, Any]]:
    """Returns the newest report of every device pool by its name, without pools whose reports are too old."""
    now = store.clock()
    with store.read() as connection:
        heartbeats = service_rows.heartbeats(connection, DEVICES.name)
    newest: dict[str, dict[str, Any]] = {}
    for report in (_with_age(heartbeat, now) for heartbeat in heartbeats):
        name, age_s = str(report["pool"]), report["age_s"]
        if not DEVICES.is_silent(age_s) and (name not in newest or age_s < newest[name]["age_s"]):
            newest[name] = report
    return newest


def _with_age(heartbeat: tuple[float, dict[str, Any]], now: float) -> dict[str, Any]:
    written_at, report = heartbeat
    return {"age_s": round(abs(now - written_at), 3), **report}


def prompt_findings_of(connection: Connection, job_key: int) -> list[str]:
    """Returns the findings of the prompt probe of a job's engine; [] without findings or probe."""
    heartbeat = service_rows.heartbeat(connection, PROMPTS.of_job(job_key))
    return [] if heartbeat is None else [str(finding) for finding in heartbeat[1]["findings"]]


def store_concurrency(store: Store, job_key: int, pid: int, *, limit: int, reason: str, waiting: int | None) -> None:
    """Stores a job's concurrency limit and its reason, in place of the last report.

    ``waiting`` is the number of requests in the engine's queues, None if unknown.
    """
    now = store.clock()
    with store.write() as connection:
        report = {"limit": limit, "reason": reason, "engine_waiting": waiting}
        service_rows.beat(connection, CONCURRENCY.of_job(job_key), pid, now, report)
        service_rows.remove_before(connection, CONCURRENCY.name, now - _MAX_AGE_S)


def concurrency_of(connection: Connection, job: JobRecord, now: float) -> dict[str, Any]:
    """Returns ``limit``, ``auto`` and, with ``num_process: auto``, ``reason`` and ``engine_waiting``; {} if unknown."""
    num_process = job.settings.all_values.get("num_process")
    if job.state not in OPEN_STATES or not job.has_runner or num_process is None:
        return {}
    if num_process != "auto":
        return {"limit": int(num_process), "auto": False}
    heartbeat = service_rows.heartbeat(connection, CONCURRENCY.of_job(job.key))
    if heartbeat is None or CONCURRENCY.is_silent(abs(now - heartbeat[0])):
        return {}
    return {**heartbeat[1], "auto": True}
