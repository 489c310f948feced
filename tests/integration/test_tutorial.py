"""The tutorial is followed word for word: its files, its commands, and what it says comes out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.tutorial_page import read_page

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
END_BACKGROUND_JOBS = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\nset -euo pipefail\n"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_tutorial_ends_with_samples(tmp_path: Path) -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    for port in ("8889", "30000"):
        text = text.replace(port, str(free_port()))
    page = read_page(text)
    page.write_into(tmp_path)
    script = END_BACKGROUND_JOBS + page.script.replace("mkdir my_generators", "mkdir -p my_generators")
    finished = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
    )
    logs = "\n".join(path.read_text(encoding="utf-8")[-2000:] for path in tmp_path.glob("*.log"))
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}\n{logs}"
    assert "reward 0.5 - trained: It is 41.<|im_end|>Sorry, it is 42.<|im_end|>" in finished.stdout
    assert finished.stdout.count("tokens trained") == 8
    assert set(page.files) == {"my_generators/second_try.py", "try_it.py", "problems.jsonl", "train.py"}
