"""StateLM's own description, pasted: its config, its data items, its numbering, its rule of what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout_settings import start_payload
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.context_editing.settings import load_settings
from slime_plugins.rollout_buffer.generator.context_editing.tool_specs import (
    ArgumentError,
    Tool,
    register_tool,
    unregister_tool,
)
from tests.context_editing_player import LINE, call, play

PASTED = """
actor_rollout_ref:
  rollout:
    max_model_length: 4096  # Maximum context length for model
    multi_turn:
      statelm_enabled: true  # Enable StateLM features
      context_length_penalty: -0.5  # Penalty for exceeding context
"""


def test_the_nested_config_is_read_where_it_stands() -> None:
    settings = load_settings(yaml.safe_load(PASTED))

    assert (settings.max_model_length, settings.context_length_penalty) == (4096, -0.5)
    assert settings.statelm_enabled
    assert load_settings({**yaml.safe_load(PASTED), "statelm": {"max_model_length": 99}}).max_model_length == 99
    with pytest.raises(ConfigError, match="context_length_penalty"):
        load_settings({"actor_rollout_ref": {"rollout": {"multi_turn": {"context_length_penalty": 1}}}})


async def test_messages_are_numbered_from_the_first_turn_when_asked() -> None:
    """Two turns with their results are 0 to 3; of the call's ids the first three are deleted, and never the task."""
    script = [
        call("buildIndex"),
        call("checkBudget"),
        call("deleteContext", message_ids=[-1, 0, 1, 2, 99]),
        call("finish", answer="x"),
    ]
    turns = (await play(script, message_ids="turns")).trajectory
    conversation = (await play(script)).trajectory

    assert turns.extra_info["deleted_msg_ids"] == [0, 1, 2]
    assert [message["msg_id"] for message in turns.messages if message["role"] != "system"][:3] == [-1, 0, 1]
    assert conversation.extra_info["deleted_msg_ids"] == [2]


async def test_a_data_item_without_a_label_is_played_and_says_that_it_earns_nothing() -> None:
    item = {key: value for key, value in LINE.items() if key not in ("label", "aliases")}
    item["extra_info"] = {"kind": "open"}
    trajectory = (await play([call("finish", answer="42")], line=item)).trajectory

    assert trajectory.reward == 0.0
    assert trajectory.extra_info["reward_source"] == "none: the line has no label"
    assert trajectory.extra_info["success"] is None


async def count_lines(document: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    if not document:
        raise ArgumentError("there is nothing to count")
    return {"lines": document.count("\n") + 1}


async def test_a_registered_tool_is_offered_and_carried_out() -> None:
    tool = Tool(name="countLines", description="Counts the lines of the document.")
    register_tool(tool, count_lines)
    try:
        with pytest.raises(ValueError, match="there is a tool 'countLines' already"):
            register_tool(tool, count_lines)
        trajectory = (await play([call("countLines"), call("finish", answer="x")])).trajectory
    finally:
        unregister_tool("countLines")
    without = (await play([call("countLines"), call("finish", answer="x")])).trajectory

    assert trajectory.extra_info["tool_calls"] == {"countLines": 1, "finish": 1}
    assert '"lines":' in next(message["content"] for message in trajectory.messages if message["role"] == "tool")
    assert without.extra_info["failed_tool_calls"] == 1


@pytest.mark.parametrize("name", ["deleteContext", "finish", "readChunk"])
def test_a_shipped_tool_is_never_replaced(name: str) -> None:
    with pytest.raises(ValueError, match="already"):
        register_tool(Tool(name=name, description="mine"), count_lines)


def test_a_pasted_config_reaches_the_job_through_slimes_custom_config() -> None:
    args = trainer_args(rollout_task_type="statelm", **yaml.safe_load(PASTED))
    payload = start_payload(args, job_id="j", start_id="s", skip_instance_ids=(), fresh=False)

    assert load_settings(payload).max_model_length == 4096
