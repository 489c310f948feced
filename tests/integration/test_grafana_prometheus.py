"""A real Prometheus scrapes a real server, and answers every expression of the Grafana file and of the metrics page.

Needs Prometheus, else it is skipped: ``ROLLOUT_BUFFER_PROMETHEUS`` names one that is not on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import BufferProcess, answers
from tests.support import written
from tests.waiting import wait_until

PROMETHEUS = os.environ.get("ROLLOUT_BUFFER_PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus on the PATH, nor in ROLLOUT_BUFFER_PROMETHEUS"),
]

ROOT = Path(__file__).resolve().parents[2]
NOTHING_TO_SAY = {"Why groups were filtered or failed", "Attempts by state", "Failed attempts per minute by error"}
"""Panels of a job in which nothing was lost."""


@pytest.fixture
def asked(start_buffer: Callable[..., BufferProcess], tmp_path: Path) -> Iterator[Callable[[str], list[Any]]]:
    """What Prometheus answers to an expression, after it has scraped a server twice."""
    buffer, port = start_buffer(), free_port()
    start = {"task_type": "external", "job_id": "run/1", "num_repeat_per_sample": 2}
    buffer.client.start_rollout(start)
    generation = {"prompt_ids": [1], "output_ids": [2], "weight_version": "3"}
    items = [
        written(f"u{number}", "ab"[number // 2], 0.25 * number, generations=[generation], extra_info={"success": True})
        for number in range(4)
    ]
    buffer.client.write(items, job_id="run/1")
    buffer.client.get_rollout_data(job_id="run/1", max_groups=1, lease_s=600.0)
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "rollout_buffer", "static_configs": [{"targets": [f"127.0.0.1:{buffer.port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # YAML, as every JSON is
    command = [
        str(PROMETHEUS), f"--config.file={tmp_path / 'prometheus.yml'}", f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={tmp_path / 'series'}",
    ]  # fmt: skip
    process = ChildProcess("prometheus", command, log_file=tmp_path / "prometheus.log")
    url = f"http://127.0.0.1:{port}"

    def ask(expression: str) -> list[Any]:
        reply = requests.get(f"{url}/api/v1/query", params={"query": expression}, timeout=20).json()
        assert reply["status"] == "success", (expression, reply)
        found: list[Any] = reply["data"]["result"]
        return found

    try:
        wait_until(lambda: answers(f"{url}/-/ready"), 60, f"start of Prometheus\n{process.log_tail(20)}")
        wait_until(lambda: ask("count_over_time(rollout_buffer_jobs[1m]) >= 2"), 60, "two scrapes")
        yield ask
    finally:
        process.stop(20)


def panels() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((ROOT / "deploy" / "grafana_dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$job", ".*").replace("$pool", ".*")


def alarms() -> list[str]:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.split("Worth an alarm:")[1].split("\n## ")[0]
    return [found.replace(r"\|", "|") for found in re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE)]


def test_prometheus_answers_every_panel_and_every_alarm(asked: Callable[[str], list[Any]]) -> None:
    silent = {title for title, expression in panels() if not asked(expression) and "device" not in expression}
    assert silent <= NOTHING_TO_SAY
    assert len(alarms()) > 4
    assert [alarm for alarm in alarms() if asked(alarm)] == []
    (balance,) = asked("sum by (job_id) (rollout_buffer_slots) == on(job_id) rollout_buffer_slots_submitted")
    assert balance["value"][1] == "4"
    (reward,) = asked('rollout_buffer_reward{job_id="run/1", statistic="mean"}')
    assert float(reward["value"][1]) == pytest.approx(0.375)
