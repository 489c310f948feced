"""The README's first command in a process of its own: everything is real but the phones and the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import process_table


def run_demo(folder: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Runs the demo to its end; returns its output and the rows that it wrote, once no process of it is left."""
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "demo", "--folder", str(folder), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = (folder / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [command for _, _, command in process_table() if str(folder) in command] == []
    return result.stdout, [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rollouts", [1, pytest.param(3, marks=pytest.mark.large)])
def test_the_demo_brings_16_samples_a_rollout_and_leaves_no_process_behind(tmp_path: Path, rollouts: int) -> None:
    said, samples = run_demo(tmp_path, "--rollouts", str(rollouts))
    assert f"All well: {16 * rollouts} samples" in said
    assert len(samples) == 16 * rollouts
    assert len({sample["reward"] for sample in samples}) > 4
    assert {sample["metadata"]["token_source"] for sample in samples} == {"generations"}
    assert all(sample["loss_mask"] is not None for sample in samples)


@pytest.mark.large
@pytest.mark.timeout(600)
def test_the_demo_in_mode_history_brings_48_trajectories_in_more_rows(tmp_path: Path) -> None:
    said, rows = run_demo(tmp_path, "--rollout-mode", "history")
    assert "All well: 48 samples (" in said
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rows_of.setdefault(row["uid"], []).append(row)
    assert len(rows_of) == 48 < len(rows)
    for members in rows_of.values():
        assert len({row["reward"] for row in members}) == 1
        assert [row["metadata"]["row"] for row in members] == list(range(members[0]["metadata"]["rows"]))
        assert {row["metadata"].get("rollout_mode") for row in members} <= {"history", None}


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_of_edited_contexts_trains_what_was_said_behind_the_last_deletion(tmp_path: Path) -> None:
    said, samples = run_demo(tmp_path, "--task", "statelm", "--rollouts", "1")
    assert "All well: 16 samples" in said
    assert len({sample["metadata"]["uid"] for sample in samples}) == 16
