"""One rank of slime's own training on the CPU: ``train_rank.py PLAN.json RANK``, inside a slime checkout.

Everything that computes is slime's and Megatron's: the parser, the conversion and the split of a rollout, the loading
of HuggingFace weights, log-probs, advantages, logging, forward, backward, Adam. Replaced are the device
(``cpu_device``), attention for packed sequences (``megatron_layer``), and packages that need a GPU or a cluster, which
are empty. The plan says which batches are trained; what came out is written beside it.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "SLIME_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

import torch

cpu_device: Any = import_module("cpu_device")  # beside this file
cpu_device.stub("sglang", "sglang_router", "torch_memory_saver", "pynvml")
cpu_device.install()
torch.set_num_threads(1)


def use_cpu_accelerator() -> None:
    """Registers the CPU where slime has a registry of accelerators; before August 2026 it spells CUDA itself."""
    try:
        accelerator = import_module("slime.utils.accelerator")
        Accelerator = import_module("slime.utils.accelerator.base").Accelerator  # noqa: N806 - a class
    except ImportError:
        return
    methods: dict[str, Any] = {
        "name": "cpu",
        "device_type": "cpu",
        "communication_backend_name": "gloo",
        "visible_devices_env": "CUDA_VISIBLE_DEVICES",
        "is_available": lambda self: True,
        "device": lambda self, index=None: cpu_device.CPU,
        "device_name": lambda self, index=None: "cpu",
        "set_device": lambda self, index: None,
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
        "communication_backend": lambda self, default="nccl": "gloo",
        "weight_update_backend": lambda self, default="nccl": "gloo",
        "resolve_visible_device_id": lambda self, device: 0,
        "mem_get_info": lambda self, device=None: (1, 1),
    }
    for name in Accelerator.__abstractmethods__ - methods.keys():
        methods[name] = lambda self, *_, **__: 0
    cpu = type("Cpu", (Accelerator,), methods)
    accelerator.register_accelerator("cpu", cpu, lambda: True)


use_cpu_accelerator()

import ray  # noqa: E402 - after the stubs

ray.get = lambda value, **_: value
ray.put = lambda value, **_: value
ray.get_gpu_ids = lambda: [0]


def read_arguments(plan: dict[str, Any]) -> Namespace:
    """Returns what slime's own parser makes of the plan's command line."""
    sys.argv = ["train.py", *plan["arguments"]]
    args: Namespace = import_module("slime.utils.arguments").parse_args()
    args.bf16, args.params_dtype, args.use_distributed_optimizer = False, torch.float32, False
    args.accumulate_allreduce_grads_in_fp32, args.ddp_average_in_collective = True, False
    return args


def samples_of(batch: dict[str, Any]) -> list[Any]:
    """Returns slime's own Samples of a batch: one line of its file each."""
    from slime.utils.types import Sample

    lines = [json.loads(line) for line in Path(batch["rows"]).read_text().splitlines()]
    return [Sample(**{**line, "status": Sample.Status(line["status"])}) for line in lines]


def shards_of(args: Namespace, samples: list[Any], ranks: int) -> list[Any]:
    """Returns what slime's RolloutManager gives each rank."""
    slime_rollout: Any = import_module("slime.ray.rollout")
    slime_rollout.ray = ray
    manager = object.__new__(slime_rollout.RolloutManager.__ray_metadata__.modified_class)
    manager.args = args
    path = args.custom_reward_post_process_path
    manager.custom_reward_post_process_func = slime_rollout.load_function(path) if path else None
    manager.custom_convert_samples_to_train_data_func = None
    manager.set_train_parallel_config(
        {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    shards: list[Any] = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples))
    return shards


def main() -> None:
    """Trains each batch of the plan from the same weights, and writes what this rank saw."""
    plan_path, rank = Path(sys.argv[1]), int(sys.argv[2])
    plan = json.loads(plan_path.read_text())
    ranks = plan["ranks"]
    args = read_arguments(plan)
    actor_type = import_module("slime.backends.megatron_utils.actor").MegatronTrainRayActor
    import_module("megatron_layer").map_norms()
    actor = actor_type(ranks, rank, "127.0.0.1", plan["port"])
    actor.init(args, "actor", with_ref=bool(plan.get("with_ref")))
    report = {batch["name"]: trained(actor, args, batch, rank, ranks) for batch in plan["batches"]}
    plan_path.with_suffix(f".{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def trained(actor: Any, args: Namespace, batch: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Trains one batch by slime's ``train_actor`` and puts the weights back; returns what went in and came out."""
    model: Any = import_module("slime.backends.megatron_utils.model")
    load_function = import_module("slime.utils.misc").load_function
    before = {name: value for name, value in vars(args).items() if name in batch["changes"]}
    vars(args).update(batch["changes"])
    shards = shards_of(args, samples_of(batch), ranks)
    weights = {name: value.detach().clone() for name, value in actor.model[0].named_parameters()}
    seen: dict[str, Any] = {"logged": {}, "steps": [], "weights_moved": 0.0, "logit_gradients": []}
    seen["micro_batches"] = shards[rank].inner["micro_batch_indices"]

    actor_module = sys.modules["slime.backends.megatron_utils.actor"]

    def log_data(rollout_id: int, its_args: Any, data: dict[str, Any]) -> Any:
        kept = (
            "tokens",
            "log_probs",
            "advantages",
            "loss_masks",
            "response_lengths",
            "rollout_ids",
            "rollout_mask_sums",
        )
        seen["data"] = {key: plain(data[key]) for key in kept if key in data}
        return original_log(rollout_id, its_args, data)

    def log(its_args: Any, metrics: dict[str, Any], step_key: str) -> None:
        seen["logged"] |= {key: float(value) for key, value in metrics.items()}

    def keep_gradients(*positional: Any, **named: Any) -> Any:
        parameters = actor.model[0].named_parameters()
        seen["gradients"] = {name: float(value.main_grad.norm()) for name, value in parameters}
        return original_optimizer_step(*positional, **named)

    def watch_logits(module: Any, inputs: Any, logits: Any) -> None:
        if torch.is_grad_enabled():
            seen["logit_gradients"].append(None)
            number = len(seen["logit_gradients"]) - 1
            logits.register_hook(lambda gradient: keep_size(number, gradient))

    def keep_size(number: int, gradient: Any) -> None:
        seen["logit_gradients"][number] = gradient.detach().abs().sum(-1).flatten().tolist()

    def one_step(*positional: Any, **named: Any) -> Any:
        losses, norm = original_step(*positional, **named)
        seen["steps"].append({"grad_norm": float(norm), "losses": {k: float(v) for k, v in losses.items()}})
        return losses, norm

    metrics_of = getattr(actor_module, "train_metric_utils", None)
    holder, name = (metrics_of, "log_rollout_data") if metrics_of else (actor_module, "log_rollout_data")
    original_log, original_step = getattr(holder, name), model.train_one_step
    setattr(holder, name, log_data)
    model.train_one_step = one_step
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").endswith("logging_utils") and hasattr(module, "log"):
            vars(module)["log"] = log
    path = None if batch["changes"].get("leave_hook_out") else getattr(args, "rollout_data_postprocess_path", None)
    actor.rollout_data_postprocess = load_function(path) if path else None
    original_optimizer_step, actor.optimizer.step = actor.optimizer.step, keep_gradients
    watched = actor.model[0].module.register_forward_hook(watch_logits)
    try:
        actor.train(batch.get("rollout_id", 0), shards)
    finally:
        setattr(holder, name, original_log)
        model.train_one_step = original_step
        actor.optimizer.step = original_optimizer_step
        watched.remove()
    now = dict(actor.model[0].named_parameters())
    moved = {name: (now[name].detach() - value) for name, value in weights.items()}
    seen["weights_moved"] = float(sum(delta.double().pow(2).sum() for delta in moved.values()) ** 0.5)
    with torch.no_grad():
        for name, value in now.items():
            value.copy_(weights[name])
    for inner in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        inner.optimizer.state.clear()
        if hasattr(inner, "reload_model_params"):
            inner.reload_model_params()
    actor.weights_backuper.backup("actor")
    vars(args).update(before)
    return seen


def plain(value: Any) -> Any:
    """Returns tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(entry) for entry in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
