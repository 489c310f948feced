"""What a start does not load: packages of extras, and what is waited for each time and needed later or never."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BUFFER = "slime_plugins.rollout_buffer"
STARTS: dict[str, set[str]] = {
    f"{BUFFER}.cli.app": {"aiohttp", "requests", "flask", "transformers", "sqlite3", f"{BUFFER}.evaluation"},
    f"{BUFFER}.supervisor.supervisor": {"aiohttp", "requests", "flask", "transformers"},
    f"{BUFFER}.server.asgi": {"aiohttp", "requests", "transformers", f"{BUFFER}.openapi.schemas"},
    f"{BUFFER}.runner.main": {"requests", "flask", "transformers"},
    f"{BUFFER}.gateway.main": set(),
    f"{BUFFER}.remote_rollout.main": set(),
    f"{BUFFER}.generator.android_world.config": set(),  # `serve` checks the devices' settings, whoever plays
    "slime.utils.mask_utils": {"jinja2", "numpy", "tokenizers", "transformers"},
    "slime.rollout.agent_rollout": {"flask", "transformers", "orjson"},
    f"{BUFFER}.trainer.row_builder": {"flask", "transformers", "orjson"},
}
"""What is started, and the modules that it must come without; ``--help`` is the first."""
WITHOUT_EXTRAS = """
import importlib.abc, sys

class OfAnExtra(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        extras = ("PIL", "ray", "math_verify", "bm25s", "uvloop", "wandb", "tensorboardX", "pyarrow",
                  "datasets", "textual_image", "opentelemetry", "torch")
        if name.split(".")[0] in extras:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OfAnExtra())
"""


@pytest.mark.parametrize("module", STARTS)
def test_a_start_needs_no_extra_and_loads_nothing_that_it_does_not_need(module: str) -> None:
    program = f"{WITHOUT_EXTRAS}\nimport {module}, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
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


def test_collecting_the_tests_loads_no_vendors_client() -> None:
    """It would take a quarter of the time, in each worker of a run."""
    tests = Path(__file__).resolve().parents[1]
    importing = re.compile(r"^(import|from) (anthropic|openai|schemathesis|wandb)\b", re.MULTILINE)
    assert [path.name for path in tests.rglob("test_*.py") if importing.search(path.read_text(encoding="utf-8"))] == []
