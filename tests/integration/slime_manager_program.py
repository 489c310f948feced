"""Run inside a slime checkout with our files laid over it: feeds agent rollouts to slime's real RolloutManager.

Only what a CPU cannot have is replaced: the sglang packages are empty modules, and ``ray.put`` returns its argument.
The data source with its checkpoint, the conversion to training data, the schedule over data-parallel ranks and the
metrics are slime's own. Prints one JSON object. ``DEMO_TOKENIZER`` names the folder of a tokenizer.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

STUBBED = ("sglang", "sglang_router", "megatron")


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
sys.path.insert(0, str(Path(__file__).parents[1]))

import slime.ray.rollout as slime_rollout  # type: ignore[import-not-found]  # noqa: E402 - slime's own, once sglang is stubbed

try:
    rollout_metrics = importlib.import_module("slime.observability.rollout_metrics")
    log_rollout = rollout_metrics.log_rollout_data
except ImportError:  # before August 2026
    rollout_metrics = slime_rollout
    log_rollout = slime_rollout._log_rollout_data
from slime.rollout import agent_rollout  # noqa: E402 - as above
from slime.rollout.data_source import (  # type: ignore[import-not-found]  # noqa: E402 - as above
    RolloutDataSourceWithBuffer,
)

if TYPE_CHECKING:
    from tests.loopback_buffer import LoopbackBuffer, probe_item
else:  # in a checkout, whose own folder tests hides ours
    from loopback_buffer import LoopbackBuffer, probe_item

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


def plain_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """As a plain ``run_rollout`` plugin writes it: messages alone, a round number. Slot 0 could not be played."""
    item = probe_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)
    item |= {"generations": [], "extra_info": {"round_number": slot, "finish_reason": "stop", "source_name": "math"}}
    if slot == 0:
        item |= {"remove_sample": True, "reward": None, "raw_reward": None, "messages": []}
        item |= {"outcome": "failed", "extra_info": {"remove_reason": "the item has no label"}}
    return item


def odd_rows_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """As ``several_rows_item`` in the first group alone: nine rows of eight trajectories."""
    make_item = several_rows_item if instance_id == "task-0" else probe_item
    return make_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)


def phone_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """As the Android World and the edited contexts' generators write it: generations, facts of many types."""
    item = several_rows_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)
    if not item["remove_sample"]:
        item["extra_info"] = {"success": slot == 2, "turns": 2, "task_name": "Wifi", "steps": None, "timings": {}}
    return item


def external_item(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """As programs outside write it: whole rewards, round numbers of any type, some without log-probs."""
    item = probe_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)
    item |= {"reward": slot % 2, "raw_reward": -1, "extra_info": {"round_number": [None, "3", 2, True][slot]}}
    if slot == 3:
        item["generations"] = [
            {key: value for key, value in turn.items() if key != "output_log_probs"} for turn in item["generations"]
        ]
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
        "rollout_buffer_short_groups": "keep",
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
    logged = rollout_metrics.compute_metrics_from_samples(manager.args, samples)
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


def logged_by_slime(args: Namespace, shard: dict[str, Any]) -> dict[str, float]:
    """Returns what slime's own training side logs of one rank's share: its sums over every key that came through.

    Megatron's parallel state says that there is one rank, and slime's gathering over ranks is what that rank has.
    """
    import torch

    logged: dict[str, float] = {}

    def gather(name: str, args: Any, rollout_id: int, figures: dict[str, Any]) -> None:
        for key, value in figures.items():
            logged[f"{name}/{key}"] = value[0] / value[1] if isinstance(value, tuple) else float(value)

    module = _training_side()
    module.gather_log_data = gather
    module.get_sum_of_sample_mean = lambda *_, **__: torch_sum
    for key in ("loss_masks", "rollout_log_probs"):
        if key in shard:
            shard[key] = [torch.as_tensor(value) for value in shard[key]]
    module.log_rollout_data(0, args, shard)
    return logged


def _training_side() -> Any:
    """Imports where this slime logs a rank's share, with Megatron's parallel state as it is for one rank."""
    parallel = importlib.import_module("megatron.core").mpu  # the stub of this program
    for name in ("context_parallel", "data_parallel", "tensor_model_parallel", "pipeline_model_parallel"):
        getattr(parallel, f"get_{name}_world_size").return_value = 1
        getattr(parallel, f"get_{name}_rank").return_value = 0
    parallel.is_pipeline_last_stage.return_value = True
    if "slime.observability" not in sys.modules:  # before August 2026
        return importlib.import_module("slime.backends.megatron_utils.data")
    cp_utils = MagicMock(get_sum_of_sample_mean=lambda *_, **__: torch_sum)
    sys.modules["slime.backends.megatron_utils"] = MagicMock(cp_utils=cp_utils)
    sys.modules["slime.backends.megatron_utils.cp_utils"] = cp_utils
    return importlib.import_module("slime.observability.train_metric_utils")


def torch_sum(tensor: Any) -> Any:
    """Stands for the mean over trajectories, which wants a process group."""
    return tensor.sum()


def log_of(make_item: Any, **changes: Any) -> dict[str, Any]:
    """Plays one rollout and returns what slime logs of it, before the training and of each rank's share."""
    instances = [f"task-{number}" for number in range(6)]
    with LoopbackBuffer(instances, make_item=make_item) as buffer, tempfile.TemporaryDirectory() as save:
        logging = {"log_multi_turn": True, "log_passrate": False, "log_correct_samples": False, "ci_test": False}
        args = manager_args(
            buffer.url,
            save,
            rollout_num_gpus=1,
            custom_rollout_log_function_path=None,
            wandb_always_use_train_step=False,
            use_wandb=False,
            use_tensorboard=False,
            hf_checkpoint=os.environ["DEMO_TOKENIZER"],
            qkv_format="thd",
            **logging,
            **changes,
        )
        manager = manager_of(args, own_rewards=True)
        samples, metrics = manager._get_rollout_data(0)
        log_rollout(0, args, samples, metrics, 1.0)
        data = manager._convert_samples_to_train_data(samples)
        types = {key: sorted({type(value).__name__ for value in values}) for key, values in data.items()}
        shards = [ref.inner for ref in manager._split_train_data_by_dp(data)]
        return {"types": types, "logged": [logged_by_slime(args, shard) for shard in shards]}


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
    """Prints a report of each rollout: plain, resumed, several rows with dummies, images, groups of one; and logs."""
    report: dict[str, Any] = {}
    instances = [f"task-{number}" for number in range(6)]
    with LoopbackBuffer(instances) as buffer, tempfile.TemporaryDirectory() as save:
        first = manager_of(manager_args(buffer.url, save), own_rewards=False)
        report["plain"] = one_rollout(first, 0)
        first.save(0)
        one_rollout(first, 1)
        agent_rollout.reset_jobs()
        resumed = manager_of(manager_args(buffer.url, save), own_rewards=False)
        resumed.load(0)
        report["resumed"] = one_rollout(resumed, 1)
    with LoopbackBuffer(instances, make_item=several_rows_item) as buffer, tempfile.TemporaryDirectory() as save:
        report["several_rows"] = one_rollout(manager_of(manager_args(buffer.url, save), own_rewards=True), 0)
    with LoopbackBuffer(instances, make_item=odd_rows_item) as buffer, tempfile.TemporaryDirectory() as save:
        ranks = manager_args(buffer.url, save, actor_num_nodes=1, actor_num_gpus_per_node=2)
        report["odd_rows"] = one_rollout(manager_of(ranks, own_rewards=True), 0)
    with LoopbackBuffer(instances, make_item=several_rows_item) as buffer, tempfile.TemporaryDirectory() as save:
        report["images"] = rollout_with_images(manager_of(manager_args(buffer.url, save), own_rewards=True))
    with LoopbackBuffer(instances) as buffer, tempfile.TemporaryDirectory() as save:
        single = manager_args(buffer.url, save, n_samples_per_prompt=1, rollout_batch_size=4, global_batch_size=4)
        report["groups_of_one"] = one_rollout(manager_of(single, own_rewards=True), 0)
    report["logs"] = {
        "plain": log_of(plain_item),
        "phone": log_of(phone_item),
        "external": log_of(external_item),
        "one_step": log_of(external_item, loss_type="policy_loss", kl_coef=0),
        "tis": log_of(external_item, use_tis=True),
    }
    print(json.dumps(report))  # noqa: T201 - a program that answers on standard output


if __name__ == "__main__":
    main()
