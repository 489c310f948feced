"""A short run of the crash test, of which ``scripts/crash_test`` makes long ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line_agents import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("without", [("ray",), pytest.param((), marks=pytest.mark.large)])
def test_nothing_is_lost_or_doubled_by_eight_kills(tmp_path: Path, without: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tests.crash.run", "--kills", "8", "--seed", "3", "--folder", str(tmp_path)]
    command += [f"--without={kind}" for kind in without]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BALANCED: 0 lost, 0 doubled" in result.stdout


@pytest.mark.large
@pytest.mark.timeout(500)
@pytest.mark.skipif(not PROGRAMS.exists(), reason="ROLLOUT_BUFFER_TEST_NPM names no folder with npm programs")
def test_command_line_agents_end_well_through_ten_kills(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.run", "--agents", "1", "--kills", "10", "--folder", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
