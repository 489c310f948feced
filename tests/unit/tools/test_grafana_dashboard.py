"""The Grafana dashboard asks for metrics that exist, for all of them, and its panels lie side by side."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.reporting.prometheus import METRICS

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana_dashboard.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
LABELS = {metric.name: set(metric.labels) for metric in METRICS}


def expressions() -> list[str]:
    queries = [choice["definition"] for choice in DASHBOARD["templating"]["list"] if "definition" in choice]
    return [*queries, *(target["expr"] for panel in PANELS for target in panel.get("targets", []))]


def test_the_file_is_up_to_date() -> None:
    command = [sys.executable, "tools/write_grafana_dashboard.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_expression_names_documented_metrics_and_every_metric_has_a_panel() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(rollout_buffer_\w+)` \|", page, flags=re.MULTILINE))
    asked = {name for expression in expressions() for name in re.findall(r"rollout_buffer_\w+", expression)}
    assert documented == asked == set(LABELS)
    assert [expression for expression in expressions() if "rollout_buffer_" not in expression] == []


def test_every_label_that_is_asked_for_is_one_of_its_metric() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            names = set(re.findall(r"rollout_buffer_\w+", target["expr"]))
            known = set.union(*(LABELS[name] for name in names))
            selectors = re.findall(r"[{,]\s*(\w+)[=!]", target["expr"])
            grouped = [
                one.strip() for by in re.findall(r"(?:by|on) ?\(([^)]*)\)", target["expr"]) for one in by.split(",")
            ]
            shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert {*selectors, *grouped, *shown} <= known, target
            if grouped:
                assert set(shown) <= set(grouped), target
