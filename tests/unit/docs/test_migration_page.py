"""The page for people who come from slime's guides names everything that these name, and what it promises is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")

FLAGS = [
    "--rollout-function-path",
    "--prompt-data",
    "--loss-mask-type",
    "--num-rollout",
    "--rollout-batch-size",
    "--rollout-max-response-len",
    "--rollout-temperature",
    "--n-samples-per-prompt",
    "--buffer-filter-path",
    "--disable-rewards-normalization",
    "--fetch-trajectory-retry-times",
    "--agent-rollout-buffer-url",
]
PAYLOAD_KEYS = [
    "num_process",
    "num_epoch",
    "remote_engine_url",
    "task_type",
    "input_file",
    "num_repeat_per_sample",
    "max_tokens",
    "sampling_params",
    "tokenizer_path",
    "skip_instance_ids",
]
ITEM_KEYS = ["uid", "instance_id", "messages", "reward", "extra_info", "raw_reward"]
ROUTES = ["/start_rollout", "/get_rollout_data", "/buffer/write", "/v1/chat/completions"]
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
SESSION = [
    "call_llm",
    "append_tool_outputs",
    "last_prompt_length",
    "response_mask",
    "response_ids",
    "token_ids",
    "prompt_token_ids",
]
TESTS_OF_MASKS = ["get_session", "count_tool_output_tokens", "rollout_server"]
COMMANDS = ["./scripts/run_agent.sh", "assign_instance_id.py --input_path"]
ANDROID_WORLD = [
    *("run_android_world.sh", "run_android_world_history.sh", "run_android_world_opt.sh", "run_android_world.py"),
    *("multi_node_ray_start.sh", "cleanup.sh", "config.yaml", "data/tasks.jsonl", "generate_tasks.py"),
    *("test_imports.py", "test_env_pool.py", "test_rollout.py", "--custom-generate-function-path"),
    *(
        "AndroidWorldEnv",
        "AndroidWorldEnvPool",
        "AndroidWorldWorker",
        "BaseInteractionEnv",
        "parse_ui_action_from_response",
    ),
    *("ANDROID_WORLD_SYSTEM_PROMPT", "ANDROID_WORLD_TEMPLATE_NO_HIS", "ANDROID_WORLD_TEMPLATE_STEP", "rescale_fn"),
    *("DUMMY_MESSAGES", "_extract_action_summary", "multimodal_train_inputs", "max_context_len", "asyncio.to_thread"),
]
STATELM = [
    *(
        "max_model_length",
        "statelm_enabled",
        "context_length_penalty",
        "raw_prompt",
        "document_content",
        "deleteContext",
    ),
    *("trajectory_snapshots", "emission_views", "assistant_turn_boundaries", "tool_agent_loop.py", "AgentData"),
]
NAMED = [*FLAGS, *PAYLOAD_KEYS, *ITEM_KEYS, *ROUTES, *SESSION, *TESTS_OF_MASKS, *COMMANDS, *ANDROID_WORLD, *STATELM]


@pytest.mark.parametrize("name", NAMED)
def test_what_the_guides_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"`[^`]*{re.escape(name)}[^`]*`", PAGE)


@pytest.mark.parametrize("module", IMPORTS)
def test_what_the_guides_import_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)

    assert [name for name in IMPORTS[module].split() if not hasattr(found, name)] == []
    assert [name for name in IMPORTS[module].split() if name not in PAGE] == []


def test_every_row_says_what_becomes_of_it() -> None:
    tables = PAGE[PAGE.index("## From the guides") :]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| the guide")]

    assert len(rows) > 80
    assert [row for row in rows if not row.split(" | ", 1)[1].strip(" |")] == []
