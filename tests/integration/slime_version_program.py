"""Run inside a slime checkout of any age with our files laid over it: what its own RolloutManager makes of our batches.

Plays a rollout of one row for each trajectory, and one with several rows; prints what reaches slime's training data, or
the sentence that refused it, as one JSON object.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import slime_manager_program as program  # type: ignore[import-not-found]

from slime.rollout.agent_rollout_sample_fields import execution_field
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH

AGE = {
    "disable_rollout_trim_samples": False,
    "debug_rollout_only": False,
    "use_dynamic_global_batch_size": False,
    "dump_details": None,
    "rollout_global_dataset": False,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": None,
}
"""Arguments that slimes of some ages read, and others do not have."""


def converted(make_item: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Returns the training data of one rollout, under the names that every age has."""
    instances = [f"task-{number}" for number in range(6)]
    with program.LoopbackBuffer(instances, make_item=make_item) as buffer, tempfile.TemporaryDirectory() as save:
        args = program.manager_args(buffer.url, save, hf_checkpoint=str(DEMO_TOKENIZER_PATH), **AGE)
        manager = program.manager_of(args, own_rewards=True)
        try:
            samples, _ = manager._get_rollout_data(0)
        except Exception as error:  # noqa: BLE001 - its sentence is what is asked for
            return {"refused": str(error)}
        data = manager._convert_samples_to_train_data(samples)
        shards = manager._split_train_data_by_dp(data, *_ranks(manager))
        return {
            "executions": data.get("rollout_ids", data.get("group_ids")),
            "rewards": data["rewards"],
            "loss_masks": data["loss_masks"],
            "log_probs": data.get("rollout_log_probs"),
            "shard_sizes": [len(getattr(shard, "inner", shard)["tokens"]) for shard in shards],
        }


def _ranks(manager: Any) -> list[int]:
    """Older slimes are told the number of ranks."""
    return [2] if "dp_size" in inspect.signature(manager._split_train_data_by_dp).parameters else []


def main() -> None:
    """Prints both rollouts and the name of the field that rows share."""
    report: dict[str, Any] = {"field": execution_field()}
    report |= {"plain": converted(program.probe_item), "several_rows": converted(program.several_rows_item)}
    print(json.dumps(report))  # noqa: T201 - a program that answers on standard output


if __name__ == "__main__":
    main()
