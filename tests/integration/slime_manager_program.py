"""Run inside a slime checkout with our files laid over it: feeds agent rollouts to slime's real RolloutManager.

Only what a CPU cannot have is replaced: the sglang packages are empty modules, and ``ray.put`` returns its argument.
The data source with its checkpoint, the conversion to training data, the schedule over data-parallel ranks and the
metrics are slime's own. Prints one JSON object.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

STUBBED = ("sglang", "sglang_router")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module under the stubbed names, and gives each any attribute that is asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        stub = MagicMock(name=spec.name)
        stub.__path__ = []
        stub.__spec__ = spec
        return stub

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _StubFinder())

import slime.ray.rollout as slime_rollout  # type: ignore[import-not-found]  # noqa: E402 - slime's own, once sglang is stubbed
from slime.observability.rollout_metrics import (  # type: ignore[import-not-found]  # noqa: E402 - as above
    compute_metrics_from_samples,
)
from slime.rollout import agent_rollout  # noqa: E402 - as above
from slime.rollout.agent_rollout_probe import LoopbackBuffer, probe_item  # noqa: E402 - as above
from slime.rollout.data_source import (  # type: ignore[import-not-found]  # noqa: E402 - as above
    RolloutDataSourceWithBuffer,
)

slime_rollout.ray.put = lambda value, **_: value


def several_rows_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """Slot 0 loses its prefix between the turns: two rows. Slot 1 could not be played."""
    item = probe_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)
    if slot == 0:
        item["generations"][1] = {**item["generations"][1], "keep": 2}
    if slot == 1:
        item |= {"remove_sample": True, "reward": None, "raw_reward": None, "generations": [], "messages": []}
        item |= {"outcome": "failed", "extra_info": {}}
    return item


def manager_args(buffer_url: str, save: str, **changes: Any) -> Namespace:
    """slime's arguments that the manager's conversion reads, and those of an agent rollout."""
    values: dict[str, Any] = {
        "rollout_buffer_url": buffer_url,
        "rollout_task_type": "probe",
        "prompt_data": None,
        "num_epoch": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "global_batch_size": 8,
        "rollout_max_response_len": 16,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "hf_checkpoint": "none",
        "fetch_trajectory_retry_times": 3,
        "loss_mask_type": "qwen",
        "buffer_filter_path": None,
        "rollout_global_dataset": True,
        "rollout_shuffle": False,
        "save": save,
        "load": save,
        "reward_key": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "load_debug_rollout_data": None,
        "log_reward_category": None,
        "use_dynamic_batch_size": False,
        "micro_batch_size": 1,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
        "sglang_speculative_algorithm": None,
    }
    return Namespace(**{**values, **changes})


def manager_of(args: Namespace, *, own_rewards: bool) -> Any:
    """Returns slime's RolloutManager without its servers."""
    kind = slime_rollout.RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(kind)
    manager.args = args
    manager.data_source = RolloutDataSourceWithBuffer(args)
    manager.generate_rollout = agent_rollout.generate_rollout
    manager.custom_reward_post_process_func = agent_rollout.post_process_rewards if own_rewards else None
    manager.custom_convert_samples_to_train_data_func = None
    manager.set_train_parallel_config(
        {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    return manager


def one_rollout(manager: Any, rollout_id: int) -> dict[str, Any]:
    """Returns what reaches the training ranks, and what the rollout logs."""
    samples, metrics = manager._get_rollout_data(rollout_id)
    data = manager._convert_samples_to_train_data(samples)
    shards = [ref.inner for ref in manager._split_train_data_by_dp(data)]
    logged = compute_metrics_from_samples(manager.args, samples)
    return {
        "instances": [sample.index for sample in samples],
        "rollout_ids": data["rollout_ids"],
        "rewards": data["rewards"],
        "raw_reward": data["raw_reward"],
        "loss_masks": data["loss_masks"],
        "mask_sums": data["rollout_mask_sums"],
        "log_probs": data.get("rollout_log_probs"),
        "shard_sizes": [len(shard["tokens"]) for shard in shards],
        "shards_have_log_probs": all("rollout_log_probs" in shard for shard in shards),
        "truncated_ratio": logged["truncated_ratio"],
        "metrics": metrics,
    }


def rollout_with_images(manager: Any) -> dict[str, Any]:
    """Gives every played row tensors that name it, and returns what of them reaches the ranks beside each row's tokens.

    The tensors are as the screenshots' conversion makes them; a dummy has none.
    """
    import torch

    samples, _ = manager._get_rollout_data(0)
    for number, sample in enumerate(samples):
        sample.tokens = [number, *sample.tokens[1:]]
        if not sample.remove_sample:
            pixels = torch.full((4, 8), float(number), dtype=torch.bfloat16)
            sample.multimodal_train_inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}
    shards = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
    pairs = []
    for shard in (ref.inner for ref in shards):
        for tokens, tensors in zip(shard["tokens"], shard["multimodal_train_inputs"], strict=True):
            named = None if tensors is None else float(tensors["pixel_values"][0, 0])
            pairs.append((int(tokens[0]), named))
    return {"pairs": sorted(pairs), "dummies": [n for n, sample in enumerate(samples) if sample.remove_sample]}


def main() -> None:
    """Prints the lives: plain, several rows with dummies, with images, groups of one, a resume from a checkpoint."""
    report: dict[str, Any] = {}
    instances = [f"task-{number}" for number in range(6)]
    with LoopbackBuffer(instances) as buffer, tempfile.TemporaryDirectory() as save:
        first = manager_of(manager_args(buffer.url, save), own_rewards=False)
        report["plain"] = one_rollout(first, 0)
        first.save(0)
        one_rollout(first, 1)
        agent_rollout.forget_jobs()
        resumed = manager_of(manager_args(buffer.url, save), own_rewards=False)
        resumed.load(0)
        report["resumed"] = one_rollout(resumed, 1)
    with LoopbackBuffer(instances, make_item=several_rows_item) as buffer, tempfile.TemporaryDirectory() as save:
        report["several_rows"] = one_rollout(manager_of(manager_args(buffer.url, save), own_rewards=True), 0)
    with LoopbackBuffer(instances, make_item=several_rows_item) as buffer, tempfile.TemporaryDirectory() as save:
        report["images"] = rollout_with_images(manager_of(manager_args(buffer.url, save), own_rewards=True))
    with LoopbackBuffer(instances) as buffer, tempfile.TemporaryDirectory() as save:
        single = manager_args(buffer.url, save, n_samples_per_prompt=1, rollout_batch_size=4, global_batch_size=4)
        report["groups_of_one"] = one_rollout(manager_of(single, own_rewards=True), 0)
    print(json.dumps(report))  # noqa: T201 - a program that answers on standard output


if __name__ == "__main__":
    main()
