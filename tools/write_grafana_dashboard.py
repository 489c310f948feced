"""Writes ``deploy/grafana_dashboard.json``: panels of all metrics of ``/metrics``.

``--check`` writes nothing and only checks that the file is up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "deploy" / "grafana_dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
ROW_HEIGHT = 1

OF_JOB = '{job_id=~"$job"}'
OF_FARM = '{pool=~"$pool"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel: its queries with their legends. ``kind`` is Grafana's panel type."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False


def _one(title: str, expression: str, legend: str, **more: Any) -> Panel:
    return Panel(title=title, queries=((expression, legend),), **more)


def _now(title: str, expression: str, unit: str = "short") -> Panel:
    return _one(title, expression, "", unit=unit, kind="stat", width=4, height=4)


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Health",
        (
            _now("Supervisor heard", "rollout_buffer_supervisor_heartbeat_age_seconds", "s"),
            _now("Running jobs", 'sum(rollout_buffer_jobs{state="running"}) or vector(0)'),
            _now("Free disk", "rollout_buffer_disk_free_bytes", "bytes"),
            _now("Stored", "sum(rollout_buffer_store_bytes)", "bytes"),
            _now("Oldest ready group", f"max(rollout_buffer_oldest_ready_group_age_seconds{OF_JOB})", "s"),
            _now(
                "Slots that do not balance",
                f"sum(abs(rollout_buffer_slots_submitted{OF_JOB} - "
                f"on(job_id) sum by (job_id) (rollout_buffer_slots{OF_JOB})))",
            ),
            _one(
                "Jobs by state",
                f"sum by (state) (rollout_buffer_jobs{OF_JOB})",
                "{{state}}",
                stacked=True,
            ),
            _one("Bytes by part", "rollout_buffer_store_bytes", "{{part}}", unit="bytes", stacked=True),
            _one("Since the trainer asked", f"rollout_buffer_poll_age_seconds{OF_JOB}", "{{job_id}}", unit="s"),
        ),
    ),
    (
        "Progress",
        (
            _one("Slots by state", f"sum by (state) (rollout_buffer_slots{OF_JOB})", "{{state}}", stacked=True),
            _one("Groups by state", f"sum by (state) (rollout_buffer_groups{OF_JOB})", "{{state}}", stacked=True),
            _one(
                "Groups closed per minute",
                '60 * sum by (job_id) (deriv(rollout_buffer_groups{job_id=~"$job", state!~"open|skipped"}[5m]))',
                "{{job_id}}",
            ),
            _one(
                "Why groups were filtered or failed",
                f"sum by (state, cause) (rollout_buffer_group_causes{OF_JOB})",
                "{{state}}: {{cause}}",
                width=16,
            ),
            _one("Deliveries by state", f"sum by (state) (rollout_buffer_deliveries{OF_JOB})", "{{state}}"),
        ),
    ),
    (
        "Rewards",
        (
            _one("Reward of the whole job", f"rollout_buffer_reward{OF_JOB}", "{{job_id}} {{statistic}}"),
            _one("Success of the whole job", f"rollout_buffer_success{OF_JOB}", "{{job_id}}", unit="percentunit"),
            _one(
                "Trajectories by outcome",
                f"sum by (outcome) (rollout_buffer_trajectories{OF_JOB})",
                "{{outcome}}",
                stacked=True,
            ),
            _one("Staleness in weight versions", f"rollout_buffer_staleness{OF_JOB}", "{{job_id}} {{statistic}}"),
            _one(
                "Log-probs of trainer and engine apart",
                f"rollout_buffer_log_prob_gap{OF_JOB}",
                "{{job_id}} {{statistic}}",
            ),
            _one("Prompts as the engine ran them", f"rollout_buffer_prompts{OF_JOB}", "{{job_id}} {{statistic}}"),
            Panel(
                title="Forks and continued turns of sessions",
                queries=(
                    (f"rollout_buffer_forks{OF_JOB}", "forks {{job_id}}"),
                    (f"rollout_buffer_continued_turns{OF_JOB}", "continued {{job_id}}"),
                ),
            ),
            _one("Trained against submitted", f"rollout_buffer_bias{OF_JOB}", "{{job_id}} {{statistic}}"),
            _one("Episodes at once", f"rollout_buffer_episodes_at_once{OF_JOB}", "{{job_id}}"),
            _one("Poll wait", f"rollout_buffer_poll_wait_seconds{OF_JOB}", "{{job_id}} {{statistic}}", unit="s"),
            _one(
                "Trajectories lost",
                f"sum by (job_id) (rollout_buffer_trajectories_late{OF_JOB})",
                "late {{job_id}}",
            ),
        ),
    ),
    (
        "Failures",
        (
            _one("Attempts by state", f"sum by (state) (rollout_buffer_attempts{OF_JOB})", "{{state}}", stacked=True),
            _one(
                "Failed attempts per minute by error",
                '60 * sum by (error_code) (deriv(rollout_buffer_attempts{job_id=~"$job", state="failed"}[10m]))',
                "{{error_code}}",
            ),
            _one(
                "Trajectories that could not be read",
                f"sum by (job_id) (rollout_buffer_trajectories_damaged{OF_JOB})",
                "{{job_id}}",
            ),
        ),
    ),
    (
        "Devices",
        (
            _one("Devices by state", f"sum by (state) (rollout_buffer_devices{OF_FARM})", "{{state}}", stacked=True),
            _one("Runners that wait", f"rollout_buffer_device_runners_waiting{OF_FARM}", "{{pool}} {{purpose}}"),
            _one("Actions per minute", f"rollout_buffer_device_actions_per_minute{OF_FARM}", "{{device_id}}"),
            _one("Failures by kind", f"sum by (kind) (rollout_buffer_device_failures{OF_FARM})", "{{kind}}"),
            _one("Health actions", f"sum by (action) (rollout_buffer_device_health_actions{OF_FARM})", "{{action}}"),
            Panel(
                title="Episodes and actions",
                queries=(
                    (f"sum by (pool) (rollout_buffer_device_episodes{OF_FARM})", "episodes {{pool}}"),
                    (f"sum by (pool) (rollout_buffer_device_steps{OF_FARM})", "actions {{pool}}"),
                ),
            ),
            _one(
                "Time to set up a task",
                f"max by (quantile) (rollout_buffer_device_reset_seconds{OF_FARM})",
                "slowest device, {{quantile}}",
                unit="s",
                width=12,
            ),
            _one(
                "Time of an action",
                f"max by (quantile) (rollout_buffer_device_step_seconds{OF_FARM})",
                "slowest device, {{quantile}}",
                unit="s",
                width=12,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    return {
        "uid": "rollout-buffer",
        "title": "Rollout buffer",
        "tags": ["rollout-buffer"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, Any]]:
    data_source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [
        data_source,
        _choice("job", "Job", "label_values(rollout_buffer_jobs, job_id)"),
        _choice("pool", "Device farm", "label_values(rollout_buffer_devices, pool)"),
    ]


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels() -> list[dict[str, Any]]:
    """Returns the panels as Grafana draws them, arranged from left to right, row by row."""
    drawn: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": ROW_HEIGHT}
        row = {"id": len(drawn) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        drawn.append(row)
        y += ROW_HEIGHT
        x = line_height = 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, line_height = 0, y + line_height, 0
            drawn.append(_panel(panel, len(drawn) + 1, x, y))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return drawn


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    if panel.kind == "timeseries":
        custom = {
            "fillOpacity": 25 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Writes the file, or with ``--check`` checks that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the file is out of date")
    wanted = json.dumps(dashboard(), indent=2) + "\n"
    if not parser.parse_args().check:
        TARGET.write_text(wanted, encoding="utf-8")
        return 0
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
        sys.stderr.write("deploy/grafana_dashboard.json is out of date: python tools/write_grafana_dashboard.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
