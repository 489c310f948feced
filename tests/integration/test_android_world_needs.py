"""The table of what each task needs is that of the package's source.

Needs the package: set ROLLOUT_BUFFER_TEST_ANDROID_WORLD to the python of an environment that has it and this project.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.generator.android_world.task_needs import task_needs

PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_ANDROID_WORLD", "")
DERIVATION = Path(__file__).resolve().parents[1] / "android_world_needs.py"


@pytest.mark.skipif(not PYTHON, reason="ROLLOUT_BUFFER_TEST_ANDROID_WORLD names no python with the package")
def test_the_table_of_needs_is_that_of_the_packages_source() -> None:
    done = subprocess.run([PYTHON, DERIVATION], capture_output=True, text=True, timeout=120, check=True)
    assert {name: sorted(needs) for name, needs in task_needs().items()} == json.loads(done.stdout)
    assert len(task_needs()) == 116
