"""The trainer side needs nothing that a slime environment does not have."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BINDING = sorted((ROOT / "slime" / "rollout").glob("agent_rollout*.py"))
CORE = sorted((ROOT / "slime_plugins" / "rollout_buffer" / "trainer").glob("*.py"))
ROOT_OF_THE_BUFFER = (
    "slime_plugins.rollout_buffer.rules.backoff",
    "slime_plugins.rollout_buffer.rules.stored_settings",
    "slime_plugins.rollout_buffer.client",
    "slime_plugins.rollout_buffer.credentials",
    "slime_plugins.rollout_buffer.errors",
    "slime_plugins.rollout_buffer.install_hints",
    "slime_plugins.rollout_buffer.rules.reward_normalization",
    "slime_plugins.rollout_buffer.rules.validity",
    "slime_plugins.rollout_buffer.tokenizer_loading",
    "slime_plugins.rollout_buffer.trainer",
    "slime_plugins.rollout_buffer.types",
    "slime_plugins.rollout_buffer.wire",
)
OF_SLIME = ("slime.rollout.agent_rollout", "slime.rollout.base_types", "slime.utils.types")
MASKS = ("slime.utils.mask_",)
PACKAGES = {"aiohttp", "requests", "transformers"}
MORE_PACKAGES = {"vision": {"PIL", "torch"}, "tracking": {"PIL", "tensorboardX", "wandb"}}
MORE_PACKAGES |= {"agent_rollout_sample_fields": {"numpy"}, "agent_rollout_settings": {"pydantic"}}
MORE_PACKAGES |= {
    "agent_rollout_data_postprocess": {"megatron", "torch"},
    "agent_rollout_advantages": {"torch"},
}  # on ranks
"""What single modules may import beside them, each where it is used."""


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", [*BINDING, *CORE], ids=lambda path: path.stem)
def test_the_trainer_side_imports_the_root_alone(path: Path) -> None:
    allowed = (*ROOT_OF_THE_BUFFER, *MASKS, *(OF_SLIME if path in BINDING else ()))
    ours = {name for name in imported_by(path) if name.startswith(("slime", "slime_plugins"))}
    others = {name.split(".")[0] for name in imported_by(path) - ours} - set(sys.stdlib_module_names)

    assert {name for name in ours if not name.startswith(allowed) and name != "slime.rollout"} == set()
    assert others <= PACKAGES | MORE_PACKAGES.get(path.stem, set())


@pytest.mark.parametrize("module", ["slime.rollout.agent_rollout", "slime_plugins.rollout_buffer.trainer.row_builder"])
def test_importing_it_loads_no_package_of_the_buffer_host(module: str) -> None:
    program = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(finished.stdout.split())

    assert {"aiohttp", "requests"} <= loaded
    assert not {"flask", "ray", "transformers", "torch", "orjson", "wandb", "tensorboardX", "PIL"} & loaded
