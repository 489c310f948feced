"""The W&B layout shows every metric that a rollout reports, once, and builds with W&B's own library."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from slime.rollout.agent_rollout_metrics import METRICS
from slime_plugins.rollout_buffer.trainer.tracking import EXAMPLES, STEP
from tools import wandb_dashboard


def test_every_metric_has_its_panel_and_no_panel_shows_what_is_not_there() -> None:
    shown = Counter(name for section in wandb_dashboard.LAYOUT for panel in section.panels for name in panel.metrics)
    assert shown == Counter(list(METRICS))
    assert (wandb_dashboard.STEP, wandb_dashboard.EXAMPLES) == (STEP, EXAMPLES)


def test_an_open_name_matches_its_values_and_no_other_metric() -> None:
    panels = [panel for section in wandb_dashboard.LAYOUT for panel in section.panels]
    slots = next(panel for panel in panels if "rollout/buffer/slots/<state>" in panel.metrics).pattern()
    assert slots is not None
    assert re.search(slots, "rollout/buffer/slots/ready")
    assert not re.search(slots, "rollout/buffer/slots/ready/more")
    assert not re.search(slots, "eval/rollout/buffer/slots/ready")
    for panel in panels:
        pattern = panel.pattern()
        for name in panel.metrics:
            assert pattern is None or re.search(pattern, re.sub(r"<\w+>", "some_Value-1", name))


def test_the_layout_is_printed_without_network_or_account(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_dashboard, "workspace", None)
    assert wandb_dashboard.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in (*METRICS, EXAMPLES) if name not in printed] == []


def test_where_to_save_must_be_said() -> None:
    with pytest.raises(SystemExit, match="2"):
        wandb_dashboard.main([])


def test_a_failure_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def save(self) -> None:
            raise ConnectionError("no route")

    monkeypatch.setattr(wandb_dashboard, "workspace", lambda *_: Refused())
    assert wandb_dashboard.main(["--entity", "e", "--project", "p"]) == 1
    assert capsys.readouterr().err == "W&B did not take the workspace: ConnectionError: no route\n"


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
