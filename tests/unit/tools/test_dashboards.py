"""Grafana's dashboard and W&B's layout show metrics that exist, and all of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.agent_rollout import LOGGED_COUNTERS
from slime_plugins.rollout_buffer.reporting.prometheus import METRICS
from slime_plugins.rollout_buffer.trainer.tracking import EXAMPLES, STEP
from tools import wandb_dashboard

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


LOGGED = [name for section in wandb_dashboard.LAYOUT for panel in section.panels for name in panel.metrics]


def test_every_counter_of_a_rollout_is_in_one_panel() -> None:
    assert max(Counter(LOGGED).values()) == 1
    assert {f"rollout/buffer/{name}" for name in LOGGED_COUNTERS} <= set(LOGGED)
    assert (wandb_dashboard.STEP, wandb_dashboard.EXAMPLES) == (STEP, EXAMPLES)


def test_the_layout_is_printed_without_network_or_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_dashboard, "workspace", None)
    assert wandb_dashboard.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in (*LOGGED, EXAMPLES) if name not in printed] == []


@pytest.mark.filterwarnings("ignore")
def test_the_library_of_wandb_takes_the_layout() -> None:
    pytest.importorskip("wandb_workspaces", reason="the library that saves workspaces is for development alone")
    view: Any = wandb_dashboard.workspace("entity", "project", "Rollouts")
    sections = view._to_model().spec.section.panel_bank_config.sections
    assert [section.name for section in sections] == ["Examples", *(one.title for one in wandb_dashboard.LAYOUT)]
    for section in sections[1:]:
        for panel in section.panels:
            assert panel.config.x_axis == STEP
            assert panel.config.metrics or panel.config.use_metric_regex
        for one, other in combinations([panel.layout for panel in section.panels], 2):
            assert one.y + one.h <= other.y or one.x + one.w <= other.x or other.x + other.w <= one.x
