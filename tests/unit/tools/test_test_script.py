"""``scripts/test``: whatever finds something fails the run, and what it found is shown."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DECIDES = ("pyproject.toml", "requirements/constraints.txt", "scripts/environment")
"""What an environment is made of; one that was made of the same is ready."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the script alone, and an environment whose programs only say what they were called with."""
    for name in (*DECIDES, "scripts/test"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    made_of = b"".join((ROOT / name).read_bytes() for name in DECIDES)
    (tmp_path / ".venv" / ".ready-dev").write_text(hashlib.sha256(made_of).hexdigest() + "\n")
    for name in ("python", "ruff", "mypy", "pytest"):
        (programs / name).write_text(f'#!/bin/bash\necho "{name} was called: $*"\nexit "${{{name}_ends:-0}}"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, **ends: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(checkout), "ROLLOUT_BUFFER_CHROMIUM": "/bin/true", **ends}
    return subprocess.run(
        [checkout / "scripts" / "test", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_all_checks_run_and_each_is_heard(checkout: Path) -> None:
    done = run(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    for said in (
        "ruff was called: check .",
        "ruff was called: format --check .",
        "mypy was called: slime ",
        "not large",
    ):
        assert said in done.stdout


@pytest.mark.parametrize("ends", [{"ruff_ends": "1"}, {"mypy_ends": "1"}, {"pytest_ends": "1"}])
def test_one_check_that_fails_fails_the_run(checkout: Path, ends: dict[str, str]) -> None:
    done = run(checkout, **ends)
    assert done.returncode == 1
    assert ("mypy was called" in done.stdout) == ("ruff_ends" not in ends)


def test_chosen_tests_run_alone(checkout: Path) -> None:
    done = run(checkout, "tests/unit", pytest_ends="5")
    assert (done.returncode, done.stdout) == (5, "pytest was called: tests/unit\n")
