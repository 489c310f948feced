"""Every batch, number of ranks, estimator and log flag through slime's own code up to the step: ``sweep.py``.

Run inside a slime checkout with our files laid over it. The conversion, the split over ranks, advantages and logging
are slime's; our hook runs between the last two, as on a training rank. Megatron's parallel state is a stub that says
which rank is asked; log-probs that the model would compute are -1. Prints one JSON object: each case by its name, with
what is refused before the first rollout, or what stopped slime, or what was logged.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import batches  # type: ignore[import-not-found]  # beside this file, which is a program
import slime_manager_program as program  # type: ignore[import-not-found]  # of the integration tests, on the path too
import torch

from slime.rollout import agent_rollout, agent_rollout_data_postprocess
from slime.rollout.agent_rollout_argument_checks import check_arguments, log_probs_come_with_the_loss
from slime.rollout.agent_rollout_batch import replace_trajectories_without_log_probs
from slime.rollout.agent_rollout_samples import finish_batch, trajectories_of
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
FLAGS = ("log_multi_turn", "log_passrate", "log_correct_samples")
RANKS = (1, 2, 4)
STEPS = {"one_step": 8, "two_steps": 4}
"""Trajectories of a step: with one step for each rollout slime computes no log-probs before it."""
HOOK = agent_rollout_data_postprocess.POSTPROCESS_PATH
LOG_PROB = -1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: a batch and the arguments that differ."""

    batch: str
    ranks: int
    estimator: str = "grpo"
    steps: str = "one_step"
    flags: tuple[str, ...] = ("log_multi_turn",)
    hook: bool = True

    @property
    def name(self) -> str:
        hook = "hook" if self.hook else "bare"
        return "-".join([self.batch, str(self.ranks), self.estimator, self.steps, "+".join(self.flags) or "none", hook])


def cases() -> Iterator[Case]:
    """Every batch with every estimator and number of ranks; every set of flags and both kinds of step with one."""
    names = [*batches.GENERATORS, *batches.ODD]
    for batch, ranks, estimator in itertools.product(names, RANKS, ESTIMATORS):
        yield Case(batch=batch, ranks=ranks, estimator=estimator)
    flags = [chosen for size in range(4) for chosen in itertools.combinations(FLAGS, size)]
    for batch, chosen, steps, hook in itertools.product(names, flags, STEPS, (True, False)):
        yield Case(batch=batch, ranks=2, flags=chosen, steps=steps, hook=hook)


def arguments(case: Case) -> Namespace:
    """Returns slime's arguments of a case, as its parser would leave them."""
    values: dict[str, Any] = {
        "advantage_estimator": case.estimator,
        "use_critic": case.estimator == "ppo",
        "global_batch_size": STEPS[case.steps],
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": case.ranks,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192,
        "rollout_data_postprocess_path": HOOK if case.hook else None,
        "custom_reward_post_process_path": "slime.rollout.agent_rollout.post_process_rewards",
        "rollout_buffer_short_groups": "refill",
        "rollout_max_response_len": 1024,
        "loss_type": "policy_loss",
        "kl_coef": 0,
        "gamma": 1.0,
        "lambd": 1.0,
        "use_opd": False,
        "use_rollout_logprobs": False,
        "normalize_advantages": False,
        "custom_advantage_function_path": None,
        "ci_test": False,
        "calculate_per_token_loss": False,
        "qkv_format": "thd",
        **{flag: flag in case.flags for flag in FLAGS},
    }
    args: Namespace = program.manager_args("http://127.0.0.1:1", "nowhere", **values)
    return args


@cache
def lines_of(batch: str) -> list[dict[str, Any]]:
    make = batches.ODD.get(batch)
    lines: list[dict[str, Any]] = make() if make else batches.mixed_rewards(batches.recorded(batch))
    return lines


def samples_of(case: Case, args: Namespace) -> list[Any]:
    """Returns the batch as ``generate_rollout`` hands it to slime; raises where it refuses dummies under ``args``."""
    groups: dict[int, dict[int, list[Any]]] = {}
    for row in lines_of(case.batch):
        sample = Sample(**{**row, "status": Sample.Status(row["status"]), "metadata": dict(row["metadata"])})
        sample.prompt = f"{row['index']}.{row['rollout_id']}"
        groups.setdefault(row["group_index"], {}).setdefault(row["rollout_id"], []).append(sample)
    members = [[rows if len(rows) > 1 else rows[0] for rows in group.values()] for group in groups.values()]
    replace_trajectories_without_log_probs(members)
    agent_rollout._refuse_dummies(args, members)
    batch = finish_batch(members, 0, args)
    return [sample for rows in trajectories_of(batch) for sample in rows]


def shards_of(case: Case, args: Namespace) -> list[dict[str, Any]]:
    """Returns what slime's RolloutManager gives each rank, as the rank's own code unpacks it."""
    kind = program.slime_rollout.RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(kind)
    manager.args = args
    manager.custom_reward_post_process_func = agent_rollout.post_process_rewards
    manager.custom_convert_samples_to_train_data_func = None
    parallel = {"dp_size": case.ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    manager.set_train_parallel_config(parallel)
    shards = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples_of(case, args)))
    data: Any = importlib.import_module("slime.utils.data")
    data.ray.get = lambda value, **_: value
    return [unpacked(data.process_rollout_data(args, shards, rank, case.ranks)) for rank in range(case.ranks)]


def unpacked(shard: dict[str, Any]) -> dict[str, Any]:
    """Makes tensors of what a rank computes with."""
    for key, kind in (("tokens", torch.long), ("loss_masks", torch.int), ("rollout_log_probs", torch.float32)):
        if key in shard:
            shard[key] = [torch.as_tensor(value, dtype=kind) for value in shard[key]]
    shard["rollout_mask_sums"] = torch.as_tensor(shard["rollout_mask_sums"], dtype=torch.float32)
    return shard


def played(case: Case) -> dict[str, Any]:
    args = arguments(case)
    said: dict[str, Any] = {}
    try:
        check_arguments(args)
    except ConfigError as refusal:
        said["refused"] = str(refusal)
    try:
        said |= logged_of(case, args)
    except InputExhaustedError as refusal:
        said["refused"] = str(refusal)
    except Exception as error:  # noqa: BLE001 - whatever stops slime is what is asked for
        said["stopped"] = f"{type(error).__name__}: {error}"
    return said


def logged_of(case: Case, args: Namespace) -> dict[str, Any]:
    """Returns what slime logs of all ranks together, and the advantages by trajectory."""
    shards = shards_of(case, args)
    _parallel_state().get_data_parallel_world_size.return_value = case.ranks
    for shard in shards:
        if not log_probs_come_with_the_loss(args):
            shard["log_probs"] = [torch.full((length,), LOG_PROB) for length in shard["response_lengths"]]
        if args.use_critic:
            shard["values"] = [torch.zeros(length) for length in shard["response_lengths"]]
        _loss().compute_advantages_and_returns(args, shard)
    if case.hook:
        run_hook(shards)
    figures = [figures_of(args, shard) for shard in shards]
    assert len({tuple(one) for one in figures}) == 1, "ranks log other keys"
    by_trajectory: dict[int, set[float]] = {}
    for shard in shards:
        for number, advantages, mask in zip(
            shard["rollout_ids"], shard["advantages"], shard["loss_masks"], strict=True
        ):
            by_trajectory.setdefault(number, set()).update(advantages[mask.bool()].tolist())
    return {
        "logged": {
            key: sum(one[key][0] for one in figures) / sum(one[key][1] for one in figures) for key in figures[0]
        },
        "advantages": {str(number): sorted(values)[:3] for number, values in by_trajectory.items()},
        "finite": all(math.isfinite(value) for values in by_trajectory.values() for value in values),
    }


def run_hook(shards: list[dict[str, Any]]) -> None:
    """Runs our hook on every rank; the ranks know of each other what a process group would tell."""
    steps = [agent_rollout_data_postprocess.played_trajectories(shard) for shard in shards]
    known = [agent_rollout_data_postprocess.knows_log_probs(shard) for shard in shards]
    for shard in shards:
        agent_rollout_data_postprocess.take_weight_off_dummies(shard, lambda _: steps)
        agent_rollout_data_postprocess.drop_unknown_log_probs(shard, lambda _: known)


def figures_of(args: Namespace, shard: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the sum and the count of everything that slime logs of one rank."""
    figures: dict[str, tuple[float, float]] = {}

    def gather(name: str, args: Any, rollout_id: int, values: dict[str, Any]) -> None:
        for key, value in values.items():
            figures[f"{name}/{key}"] = value if isinstance(value, tuple) else (float(value), 1.0)

    logging = _logging()
    logging.gather_log_data = gather
    logging.log_rollout_data(0, args, shard)
    return figures


@cache
def _parallel_state() -> Any:
    parallel = importlib.import_module("megatron.core").mpu  # a stub
    for name in ("context_parallel", "data_parallel", "tensor_model_parallel", "pipeline_model_parallel"):
        getattr(parallel, f"get_{name}_world_size").return_value = 1
        getattr(parallel, f"get_{name}_rank").return_value = 0
    parallel.is_pipeline_last_stage.return_value = True
    return parallel


@cache
def _loss() -> Any:
    _parallel_state()
    return importlib.import_module("slime.backends.megatron_utils.loss")


@cache
def _logging() -> Any:
    """slime's module that logs a rank's share, whatever its age."""
    _parallel_state()
    try:
        return importlib.import_module("slime.observability.train_metric_utils")
    except ImportError:  # before August 2026
        return importlib.import_module("slime.backends.megatron_utils.data")


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps({case.name: played(case) for case in cases()}))  # noqa: T201 - it answers on standard output


if __name__ == "__main__":
    main()
