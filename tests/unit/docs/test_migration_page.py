"""The page for people who come from slime's guides names everything that these name, and what it promises is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")

IMPORTS = {
    "slime.rollout.agent_rollout": "generate_agent_rollout get_rollout_data start_rollout log_raw_info",
    "slime.utils.mask_utils": "MultiTurnLossMaskGenerator",
    "slime_plugins.rollout_buffer.generator": "BaseGenerator query_single_turn",
    "slime_plugins.rollout_buffer.generator.base_generator": "BaseGenerator query_single_turn",
    "slime_plugins.rollout_buffer.remote_rollout.session": "RolloutSession",
    "slime_plugins.rollout_buffer.generator.context_editing.snapshots": (
        "snapshots_of emission_views_of turn_boundaries_of full_history_of"
    ),
    "slime_plugins.rollout_buffer.generator.context_editing.tool_specs": "register_tool",
    "examples.android_world.env_android_world": "AndroidWorldEnv BaseInteractionEnv",
    "examples.android_world.env_pool": "AndroidWorldEnvPool",
    "examples.android_world.env_worker": "AndroidWorldWorker parse_ui_action_from_response rescale_fn",
    "examples.android_world.prompts": (
        "ANDROID_WORLD_SYSTEM_PROMPT ANDROID_WORLD_TEMPLATE ANDROID_WORLD_TEMPLATE_NO_HIS ANDROID_WORLD_TEMPLATE_STEP"
    ),
}


@pytest.mark.parametrize("module", IMPORTS)
def test_what_the_guides_import_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in IMPORTS[module].split() if not hasattr(found, name)] == []
    assert [name for name in IMPORTS[module].split() if name not in PAGE] == []


def test_every_row_says_what_becomes_of_it() -> None:
    tables = PAGE[PAGE.index("## From the guides") :]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| the guide")]

    assert len(rows) > 35
    assert [row for row in rows if not row.split(" | ", 1)[1].strip(" |")] == []
