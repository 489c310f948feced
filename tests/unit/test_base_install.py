"""What the package without extras can do: serve, and play what needs no devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORBID = (
    "import importlib.abc, sys\n"
    "class OfAnExtra(importlib.abc.MetaPathFinder):\n"
    "    def find_spec(self, name, path, target=None):\n"
    "        extras = ('PIL', 'ray', 'math_verify', 'bm25s', 'uvloop', 'wandb', 'tensorboardX', 'pyarrow',\n"
    "                  'datasets', 'textual_image', 'opentelemetry', 'torch')\n"
    "        if name.split('.')[0] in extras: raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
    "sys.meta_path.insert(0, OfAnExtra())\n"
)


def run_without_extras(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FORBID + program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "room",
    [
        "supervisor.supervisor",
        "server.asgi",
        "runner.main",
        "gateway.main",
        "remote_rollout.main",
        "generator.android_world.config",  # `serve` checks the devices' settings, whoever plays
    ],
)
def test_every_process_starts_without_extras(room: str) -> None:
    finished = run_without_extras(f"import slime_plugins.rollout_buffer.{room}")
    assert finished.returncode == 0, finished.stderr


def test_the_trainers_side_needs_no_extra() -> None:
    finished = run_without_extras("import slime.rollout.agent_rollout, slime.utils.mask_utils")
    assert finished.returncode == 0, finished.stderr
