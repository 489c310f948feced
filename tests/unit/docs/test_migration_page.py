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


@pytest.mark.parametrize("name", [*FLAGS, *PAYLOAD_KEYS, *ITEM_KEYS, *ROUTES, *SESSION, *TESTS_OF_MASKS, *COMMANDS])
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

    assert len(rows) > 40
    assert [row for row in rows if not row.split(" | ", 1)[1].strip(" |")] == []
