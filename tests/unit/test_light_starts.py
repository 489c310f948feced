"""What a start does not load: it is waited for each time, and needed later or never."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

STARTS = {
    "slime_plugins.rollout_buffer.cli.app": {
        "aiohttp",
        "requests",
        "flask",
        "transformers",
        "sqlite3",
        "slime_plugins.rollout_buffer.evaluation",
    },
    "slime_plugins.rollout_buffer.supervisor.supervisor": {"aiohttp", "requests", "flask", "transformers"},
    "slime_plugins.rollout_buffer.server.asgi": {
        "aiohttp",
        "requests",
        "transformers",
        "slime_plugins.rollout_buffer.openapi.schemas",
    },
    "slime_plugins.rollout_buffer.runner.main": {"requests", "flask", "transformers"},
}
"""What is started, and the modules that it must come without; ``--help`` is the first."""


@pytest.mark.parametrize("module", STARTS)
def test_a_start_loads_nothing_that_it_does_not_need(module: str) -> None:
    program = f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    loaded: list[str] = json.loads(done.stdout)
    assert module in loaded
    assert STARTS[module] & set(loaded) == set()


def test_what_the_workers_of_a_server_are_forked_from_has_the_application_and_one_thread() -> None:
    program = (
        "import sys, threading\n"
        "from slime_plugins.rollout_buffer.server.gunicorn_config import on_starting\n"
        "on_starting(None)\n"
        "print('slime_plugins.rollout_buffer.server.asgi' in sys.modules, threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["True", "1"]
