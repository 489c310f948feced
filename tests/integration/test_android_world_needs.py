"""The table of what each task needs is that of the package's source.

Needs the package: set ROLLOUT_BUFFER_TEST_ANDROID_WORLD to the python of an environment that has it and this project.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from slime_plugins.rollout_buffer.generator.android_world.task_needs import task_needs
from tests.integration.conftest import ANDROID_WORLD_PYTHON as PYTHON
from tests.integration.conftest import needs_android_world

DERIVATION = Path(__file__).resolve().parents[1] / "android_world_needs.py"


@needs_android_world
def test_the_table_of_needs_is_that_of_the_packages_source() -> None:
    done = subprocess.run([PYTHON, DERIVATION], capture_output=True, text=True, timeout=120, check=True)
    assert {name: sorted(needs) for name, needs in task_needs().items()} == json.loads(done.stdout)
    assert len(task_needs()) == 116
