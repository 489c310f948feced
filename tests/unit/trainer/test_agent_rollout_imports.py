"""The trainer side needs nothing that a slime environment does not have."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAINER_FILES = sorted((ROOT / "slime" / "rollout").glob("agent_rollout*.py"))
CORRIDOR = (
    "slime.rollout.agent_rollout",
    "slime.rollout.base_types",
    "slime.utils.mask_generator",
    "slime.utils.types",
    "slime_plugins.rollout_buffer.rules.backoff",
    "slime_plugins.rollout_buffer.client",
    "slime_plugins.rollout_buffer.errors",
    "slime_plugins.rollout_buffer.overlay_advice",
    "slime_plugins.rollout_buffer.rules.vocabulary",
    "slime_plugins.rollout_buffer.wire",
)
PACKAGES = {"aiohttp", "requests", "transformers"}
MORE_PACKAGES = {
    "agent_rollout_multimodal": {"PIL", "torch"},
    "agent_rollout_tracking": {"PIL", "tensorboardX", "wandb"},
}
"""What single rooms may import beside them, each where it is used."""


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", TRAINER_FILES, ids=lambda path: path.stem)
def test_the_trainer_side_keeps_to_its_corridor(path: Path) -> None:
    ours = {name for name in imported_by(path) if name.startswith(("slime", "slime_plugins"))}
    others = {name.split(".")[0] for name in imported_by(path) - ours} - set(sys.stdlib_module_names)

    assert {name for name in ours if not name.startswith(CORRIDOR) and name != "slime.rollout"} == set()
    assert others <= PACKAGES | MORE_PACKAGES.get(path.stem, set())


def test_importing_it_loads_no_package_of_the_buffer_host() -> None:
    program = "import sys, slime.rollout.agent_rollout; print(*{name.split('.')[0] for name in sys.modules})"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(finished.stdout.split())

    assert {"aiohttp", "requests"} <= loaded
    assert not {"pydantic", "flask", "ray", "transformers", "torch", "orjson", "wandb", "tensorboardX", "PIL"} & loaded
