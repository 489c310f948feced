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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "SLIME_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

import torch

cpu_device: Any = import_module("cpu_device")  # beside this file, as is what follows
watched: Any = import_module("watching").watched
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

    rows = Path(batch["rows"])
    if rows.suffix == ".pt":  # rows with the tensors of their images
        return [Sample(**fields) for fields in torch.load(rows, weights_only=False)]
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    return [named({**line, "status": Sample.Status(line["status"])}, Sample) for line in lines]


def named(fields: dict[str, Any], kind: Any) -> Any:
    """Returns the Sample of a row; one of a job is named as ``agent_rollout`` names it."""
    job_id = fields.pop("job_id", None)
    sample = kind(**fields)
    if job_id is not None:
        from slime.rollout.agent_rollout_data_postprocess import RowName

        uid, row = fields["prompt"], fields["metadata"]["row"]
        sample.index = RowName.of(sample.index, job_id=job_id, uid=uid, row=row)
    return sample


def compared(args: Namespace, samples: list[Any]) -> list[Any]:
    """Compares returns within groups, as ``agent_rollout`` does with the batch that it hands over."""
    if args.custom_advantage_function_path:
        from slime.rollout.agent_rollout_advantages import give_turn_advantages

        give_turn_advantages(args, samples)
    return samples


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
    if args.use_routing_replay:  # slime sets it for the actors' processes
        os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    actor_type = import_module("slime.backends.megatron_utils.actor").MegatronTrainRayActor
    import_module("megatron_layer").load_hf_weights()
    actor = actor_type(ranks, rank, "127.0.0.1", plan["port"])
    actor.init(args, "actor", with_ref=bool(plan.get("with_ref")))
    report = {batch["name"]: trained(actor, args, batch, rank, ranks) for batch in plan["batches"]}
    plan_path.with_suffix(f".{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def trained(actor: Any, args: Namespace, batch: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Trains one batch by slime's own ``train`` and puts the weights back; returns what was seen."""
    with changed(args, batch["changes"]), untouched_weights(actor):
        shards = shards_of(args, compared(args, samples_of(batch)), ranks)
        actor.rollout_data_postprocess = hook_of(args, batch["changes"])
        before = weights_of(actor)
        with watched(actor) as seen:
            actor.train(batch.get("rollout_id", 0), shards)
        seen["weights_moved"] = distance(before, weights_of(actor))
        seen["micro_batches"] = shards[rank].inner["micro_batch_indices"]
        flush_reports()
    return dict(seen)


@contextmanager
def changed(args: Namespace, changes: dict[str, Any]) -> Iterator[None]:
    before = vars(args).copy()
    vars(args).update(changes)
    try:
        yield
    finally:
        vars(args).clear()
        vars(args).update(before)


@contextmanager
def untouched_weights(actor: Any) -> Iterator[None]:
    """Restores the weights of the model after the block, and clears the state of the optimizer."""
    before = weights_of(actor)
    yield
    with torch.no_grad():
        for name, value in actor.model[0].named_parameters():
            value.copy_(before[name])
    for inner in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        inner.optimizer.state.clear()
        if hasattr(inner, "reload_model_params"):
            inner.reload_model_params()
    actor.weights_backuper.backup("actor")


def weights_of(actor: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in actor.model[0].named_parameters()}


def distance(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Returns how far the parameters moved, as one vector."""
    return float(sum((after[name] - value).double().pow(2).sum() for name, value in before.items()) ** 0.5)


def hook_of(args: Namespace, changes: dict[str, Any]) -> Any:
    """Returns what slime calls between advantages and step, unless the batch leaves it out."""
    path = None if changes.get("leave_hook_out") else args.rollout_data_postprocess_path
    return import_module("slime.utils.misc").load_function(path) if path else None


def flush_reports() -> None:
    """Waits until what the hook reports to a buffer has arrived there."""
    reports = sys.modules.get("slime.rollout.agent_rollout_data_postprocess")
    for reporter in reports.reporters() if reports else ():
        reporter.flush()


if __name__ == "__main__":
    main()
