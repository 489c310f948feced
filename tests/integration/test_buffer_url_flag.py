"""The older flag for the buffer's address reaches the rollout function in an actor of slime's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.large

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import ray

ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")


@ray.remote
class RolloutManager:
    def buffer_url(self):
        from slime.rollout.agent_rollout_settings import read_settings
        from rollout_buffer_lab.mock_trainer import trainer_args

        return read_settings(trainer_args(rollout_buffer_url=None)).buffer_url


print(ray.get(RolloutManager.remote().buffer_url.remote()))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "words", [["--agent-rollout-buffer-url", "http://old:1"], ["--agent-rollout-buffer-url=http://old:1"]]
)
def test_a_flag_of_the_driver_is_read_in_the_actor(words: list[str], tmp_path: Path) -> None:
    driver = tmp_path / "train.py"
    driver.write_text(DRIVER)
    finished = subprocess.run(
        [sys.executable, str(driver), "--save", "a folder", *words, "--num-rollout", "3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert finished.stdout.splitlines()[-1:] == ["http://old:1"], finished.stderr[-3000:]
