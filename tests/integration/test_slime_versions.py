"""The table of slime versions in docs/slime.md, each row tried on the ends of its range with slime's own manager.

Needs ``ROLLOUT_BUFFER_TEST_SLIME_GIT``, a git directory of slime with its history, and a Python with slime's CPU
requirements, ``ROLLOUT_BUFFER_TEST_SLIME_PYTHON`` where it is not the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.slime_step.running import PYTHON
from tools.install_into_slime import Overlay, OverlayError
from tools.launching.models import backends_of, has_flag, trains_qwen3_5_vl, trains_qwen3_vl

ROOT = Path(__file__).resolve().parents[2]
GIT = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME_GIT", "")
FOLDERS = ("slime", "slime_plugins", "scripts/models")

pytestmark = [
    pytest.mark.slime,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not GIT, reason="set ROLLOUT_BUFFER_TEST_SLIME_GIT to a git directory of slime"),
]


@dataclass(frozen=True)
class Row:
    """One end of a range of commits, and what the table says of it."""

    commit: str
    overlay: str
    backends: str
    vision: str


def rows_of_the_table() -> list[Row]:
    page = (ROOT / "docs" / "slime.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (`[0-9a-f]{9}`.*) \|$", page, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [
        Row(commit=commit, overlay=overlay, backends=backends, vision=vision)
        for commits, _, overlay, backends, vision, *_ in cells
        for commit in re.findall(r"`([0-9a-f]{9})`", commits)
    ]


ROWS = rows_of_the_table()


def test_the_table_has_rows() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.commit)
def test_each_row_of_the_table_is_true(row: Row, tmp_path: Path) -> None:
    checkout = checkout_of(row.commit, tmp_path)
    if row.overlay.startswith("refused"):
        with pytest.raises(OverlayError) as refusal:
            Overlay(checkout).install()
        assert row.overlay.removeprefix("refused: ").strip("`") in str(refusal.value)
        return

    Overlay(checkout).install()

    assert backends_of(checkout) == tuple(re.findall(r"\w+", row.backends.lower()))
    assert trains_qwen3_vl(checkout) is ("Qwen3-VL" in row.vision)
    assert trains_qwen3_5_vl(checkout) is ("Qwen3.5-VL" in row.vision)
    assert has_flag(checkout, "--rollout-function-path")
    report = report_of(checkout)
    assert report["plain"]["loss_masks"] == [[1, 1, 0, 0, 1, 1, 1]] * 8
    assert report["plain"]["log_probs"] == [[-0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -0.125]] * 8
    assert report["plain"]["shard_sizes"] == [4, 4]
    if row.overlay == "one row per trajectory":
        assert "rollout_mode incremental" in report["several_rows"]["refused"]
    else:
        assert row.overlay == "installs"
        assert report["several_rows"]["executions"] == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7]


def checkout_of(commit: str, folder: Path) -> Path:
    """Unpacks what the overlay and the manager need of a commit."""
    in_git = ["git", "--git-dir", GIT]
    have = subprocess.run(
        [*in_git, "ls-tree", "--name-only", commit, *FOLDERS], capture_output=True, check=True, text=True
    )
    archive = subprocess.run([*in_git, "archive", commit, *have.stdout.split()], capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def report_of(checkout: Path) -> dict[str, Any]:
    program = ROOT / "tests" / "integration" / "slime_version_program.py"
    finished = subprocess.run(
        [PYTHON, str(program)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    report: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return report
