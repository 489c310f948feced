"""The W&B layout shows every metric that a rollout reports, once, and builds with W&B's own library."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from slime.rollout.agent_rollout import LOGGED_COUNTERS
from slime_plugins.rollout_buffer.trainer.tracking import EXAMPLES, STEP
from tools import wandb_dashboard

METRICS = [name for section in wandb_dashboard.LAYOUT for panel in section.panels for name in panel.metrics]


def test_every_counter_of_a_rollout_is_in_one_panel() -> None:
    assert max(Counter(METRICS).values()) == 1
    assert {f"rollout/buffer/{name}" for name in LOGGED_COUNTERS} <= set(METRICS)
    assert (wandb_dashboard.STEP, wandb_dashboard.EXAMPLES) == (STEP, EXAMPLES)


def test_the_layout_is_printed_without_network_or_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_dashboard, "workspace", None)
    assert wandb_dashboard.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in (*METRICS, EXAMPLES) if name not in printed] == []


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
