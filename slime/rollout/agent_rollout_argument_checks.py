"""Refuses combinations of slime's arguments that agent rollouts do not support, before the first episode.

Without these checks, such a combination fails later in slime's training code, with an assertion that names no flag, or
has no effect. The error names the flags to change; ``docs/trainer.md`` lists the combinations.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_sample_fields import execution_field
from slime.rollout.agent_rollout_settings import (
    ADVANTAGE_PATH,
    ShortGroups,
    buffer_attributes,
    eval_sets,
    read_image_settings,
    read_mask_settings,
    read_row_settings,
    read_settings,
    read_tracking_settings,
    read_turn_discount,
    start_payload,
    step_size,
    trains_without_log_probs,
    trajectories_of_rollout,
    wanted_records,
)
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.mask_selection import check_masks

ESTIMATORS_WITHOUT_DUMMIES = frozenset({"reinforce_plus_plus"})
"""Advantage estimators of slime that assert that every sequence has a trained token."""
STD_ESTIMATORS = frozenset({"grpo", "gspo", "cispo"})
"""Advantage estimators of slime that divide rewards by the standard deviation of their group."""
NORMALIZING_ESTIMATORS = STD_ESTIMATORS | {"reinforce_plus_plus_baseline"}
"""Advantage estimators of slime that compare rewards within their group."""
REMOTE_ROLLOUT = "remote_rollout"
"""The task type of episodes that a rollout server plays."""
UNSUPPORTED_HOOKS = {
    "rollout_sample_filter_path": "define filter_item in the generator, or use --buffer-filter-path",
    "rollout_all_samples_process_path": "use --buffer-filter-path, or --custom-rollout-log-function-path to read only",
    "dynamic_sampling_filter_path": "define is_valid_group in the generator",
    "rollout_sample_hook_path": "define transform_group in the generator",
    "custom_generate_function_path": "episodes are played by the generator of --rollout-task-type",
    "custom_rm_path": "rewards come from the generator of --rollout-task-type",
    "rm_type": "rewards come from the generator of --rollout-task-type",
}
"""Hooks that slime calls only in its own rollout function, each with what replaces it here."""
LEAVE_HOOK_OUT = "leave it out, and post_process_rewards corrects for dummies"
VIRTUAL_PIPELINE = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")
"""Arguments of which each divides the pipeline stages into virtual stages."""


def check_arguments(args: Any) -> None:
    """Checks that slime's training code supports agent rollouts with these arguments.

    Raises:
        ConfigError: it does not support them; the message names the flags to change, the detail lists every reason.
    """
    reasons = [reason for check in CHECKS for reason in check(args)]
    if reasons:
        raise ConfigError("; ".join(reasons), {"reasons": reasons})


def refusals(args: Any) -> list[str]:
    """Returns every reason for which the rollout function would stop before its first episode."""
    reasons: list[str] = []
    for check in (*READERS, check_arguments):
        try:
            check(args)
        except ConfigError as error:
            reasons += error.detail.get("reasons", [str(error)])
    return list(dict.fromkeys(reasons))


def data_parallel_size(args: Any) -> int | None:
    """Returns the number of data-parallel ranks; None if the arguments do not define it."""
    gpus = (getattr(args, "actor_num_nodes", None) or 0) * (getattr(args, "actor_num_gpus_per_node", None) or 0)
    if not gpus:
        return None
    parallel: int = math.prod(
        getattr(args, name, None) or 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    )
    return max(1, int(gpus) // parallel)


def rows_divisor(args: Any) -> int:
    """Returns the number that the rows of a step must be divisible by; 1 if slime accepts any number."""
    ranks = data_parallel_size(args)
    if ranks is None or getattr(args, "use_dynamic_batch_size", True):
        return 1
    if any(getattr(args, name, None) for name in VIRTUAL_PIPELINE):
        # Virtual stages take micro-batches in whole groups. _check_ranks requires that the step size fills such groups.
        return step_size(args)
    return ranks * int(getattr(args, "micro_batch_size", None) or 1)


def log_probs_come_with_the_loss(args: Any) -> bool:
    """Returns True if slime computes the trainer's log-probs only in the loss, because nothing needs them before it."""
    if getattr(args, "use_rollout_logprobs", False):
        return not getattr(args, "get_mismatch_metrics", False)
    if getattr(args, "use_routing_replay", False) or getattr(args, "get_mismatch_metrics", False):
        return False
    return getattr(args, "advantage_estimator", None) != "gspo" and trains_without_log_probs(args)


def _check_step_size(args: Any) -> Iterator[str]:
    trajectories, step = trajectories_of_rollout(args), step_size(args)
    if step > trajectories or trajectories % step:
        yield (
            f"--global-batch-size {step} does not divide the {trajectories} trajectories of a rollout "
            f"(--rollout-batch-size {args.rollout_batch_size} × --n-samples-per-prompt {args.n_samples_per_prompt}): "
            "slime would silently not train the rest"
        )


def _check_ranks(args: Any) -> Iterator[str]:
    ranks, step = data_parallel_size(args), step_size(args)
    if ranks is None:
        return
    if getattr(args, "use_dynamic_batch_size", True):
        if step < ranks:
            yield f"--global-batch-size {step} is less than the {ranks} data-parallel ranks, each of which needs a row"
        return
    divisor = ranks * int(getattr(args, "micro_batch_size", None) or 1)
    if any(getattr(args, name, None) for name in VIRTUAL_PIPELINE):
        stages = getattr(args, "pipeline_model_parallel_size", None)
        # Megatron's own default is a group of as many micro-batches as there are pipeline stages.
        divisor *= int(getattr(args, "microbatch_group_size_per_vp_stage", None) or stages or 1)
    if step % divisor:
        yield (
            f"--global-batch-size {step} is no multiple of {divisor}, the data-parallel ranks times "
            "--micro-batch-size (times --microbatch-group-size-per-vp-stage): set --use-dynamic-batch-size with "
            "--max-tokens-per-gpu, or change one of them"
        )


def _check_estimator(args: Any) -> Iterator[str]:
    estimator = getattr(args, "advantage_estimator", None)
    if estimator not in ESTIMATORS_WITHOUT_DUMMIES:
        return
    if buffer_attributes(args).rollout_buffer_short_groups is ShortGroups.KEEP:
        yield (
            f"--advantage-estimator {estimator} fails on a dummy, which has no trained token: "
            "set rollout_buffer_short_groups: refill"
        )
    if not getattr(args, "use_dynamic_batch_size", True) and rows_divisor(args) > 1:
        yield (
            f"--advantage-estimator {estimator} fails on the untrained rows that fill up micro-batches of fixed size "
            "if a trajectory has several rows: set --use-dynamic-batch-size"
        )


def _check_logging_flags(args: Any) -> Iterator[str]:
    if getattr(args, "log_passrate", False):
        yield (
            "--log-passrate treats the rows of a batch as trajectories in groups of equal size, and fails after a "
            "batch with others: leave it out, rollout/pass_at/<k> is the same by trajectory"
        )
    if getattr(args, "log_correct_samples", False) and log_probs_come_with_the_loss(args):
        yield (
            "--log-correct-samples reads log-probs that slime does not compute here before the loss: leave it out, or "
            "set --num-steps-per-rollout 2 or more"
        )
    if getattr(args, "log_correct_samples", False) and (data_parallel_size(args) or 1) > 1 and not _splits_rewards():
        yield (
            "--log-correct-samples pairs the rewards of all data-parallel ranks with the rows of one rank in this "
            "slime, which fails: leave it out, or use a slime from August 2026 on"
        )
    if getattr(args, "log_reward_category", None):
        yield "--log-reward-category reads a key of the reward, and the rewards of a rollout buffer are numbers"


def _splits_rewards() -> bool:
    """Returns True if this slime gives each rank the rewards of its own rows; True without slime."""
    try:
        data = importlib.import_module("slime.utils.data")
    except ImportError:
        return True
    # The function names this key only if it splits the rewards.
    return "local_raw_reward" in data.process_rollout_data.__code__.co_consts


def _check_hooks(args: Any) -> Iterator[str]:
    for name, instead in UNSUPPORTED_HOOKS.items():
        if getattr(args, name, None):
            yield f"--{name.replace('_', '-')} is called only by slime's own rollout function: {instead}"
    if getattr(args, "rollout_data_postprocess_path", None) != POSTPROCESS_PATH:
        return
    flag = "--rollout-data-postprocess-path"
    if getattr(args, "train_backend", "megatron") != "megatron":
        yield f"{flag} is called only by slime's Megatron backend, not by {args.train_backend}: {LEAVE_HOOK_OUT}"
    elif execution_field() != "rollout_id":
        yield f"{flag}: this slime has no rollout_mask_sums, which our hook changes: {LEAVE_HOOK_OUT}"


def _check_turn_rewards(args: Any) -> Iterator[str]:
    """Checks the hook through which slime trains rewards of turns; older versions of slime do not have it."""
    flag, path = "--custom-advantage-function-path", getattr(args, "custom_advantage_function_path", None)
    if getattr(args, "rollout_buffer_turn_discount", None) is not None and path != ADVANTAGE_PATH:
        if hasattr(args, "custom_advantage_function_path"):
            yield f"rollout_buffer_turn_discount trains rewards of turns through a hook: set {flag} {ADVANTAGE_PATH}"
        else:
            yield (
                f"rollout_buffer_turn_discount needs {flag}, which this slime does not have: leave it out, or use a "
                "slime from June 2026 on"
            )
    if path != ADVANTAGE_PATH:
        return
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in STD_ESTIMATORS:
        yield f"{flag} {path} compares returns within groups, and --advantage-estimator {estimator} does not: use grpo"
    if execution_field() != "rollout_id":
        yield f"{flag} {path}: this slime has no rollout_mask_sums, which weigh rows: use a slime from June 2026 on"
    if getattr(args, "calculate_per_token_loss", False):
        yield f"--calculate-per-token-loss weighs tokens, and {flag} {path} weighs rows: leave one of them out"


def _check_engine_flags(args: Any) -> Iterator[str]:
    if getattr(args, "use_rollout_routing_replay", False) and not getattr(args, "moe_router_topk", None):
        yield (
            "--use-rollout-routing-replay needs a model with experts, and --moe-router-topk is not set: leave it out, "
            "or pass the model's arguments"
        )
    if wanted_records(args) and getattr(args, "rollout_task_type", None) == REMOTE_ROLLOUT:
        yield (
            f"the task type {REMOTE_ROLLOUT} returns neither routed experts nor top-p ids: leave "
            "--use-rollout-routing-replay out and set --rollout-top-p 1"
        )
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "sglang":
        yield "--opd-type sglang needs the teacher's log-probs with the rollout: use --opd-type megatron"


def sees_images(args: Any) -> bool:
    """Returns True if the trained model has a vision tower, by its ``config.json``."""
    return "vision_config" in _model_config(args)


def is_tokenizer_alone(args: Any) -> bool:
    """Returns True if ``--hf-checkpoint`` is a folder without a model, as in the demo: nothing is trained."""
    return _checkpoint(args).is_dir() and not (_checkpoint(args) / "config.json").is_file()


def needs_even_row_lengths(args: Any) -> bool:
    """Returns True if slime requires an even number of tokens in each row, as its Qwen3.5 with vision does.

    That model splits rows into two pieces per context-parallel rank, and fails on an odd length.
    """
    return sees_images(args) and str(_model_config(args).get("model_type")).startswith("qwen3_5")


def _model_config(args: Any) -> dict[str, Any]:
    try:
        config = json.loads((_checkpoint(args) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _checkpoint(args: Any) -> Path:
    return Path(str(getattr(args, "hf_checkpoint", None) or ""))


def _check_image_processor(args: Any) -> Iterator[str]:
    """Checks that a vision model has an image processor: slime fails on a placeholder without its tensors."""
    if read_image_settings(args) is None:
        return
    checkpoint = _checkpoint(args)
    names = ("preprocessor_config.json", "processor_config.json")
    if sees_images(args) and not any((checkpoint / name).is_file() for name in names):
        yield (
            f"--hf-checkpoint {checkpoint} is a vision model and has no {' or '.join(names)}: rows with screenshots "
            "would reach it without their tensors; put the files of its processor there"
        )


CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    _check_step_size,
    _check_ranks,
    _check_estimator,
    _check_logging_flags,
    _check_hooks,
    _check_turn_rewards,
    _check_engine_flags,
    _check_image_processor,
)
"""Each yields the reasons for which slime's training code would not support the arguments."""


def _read_eval_sets(args: Any) -> None:
    if getattr(args, "eval_interval", None) is not None:
        eval_sets(args)


READERS: tuple[Callable[[Any], object], ...] = (
    read_settings,
    read_tracking_settings,
    read_image_settings,
    read_turn_discount,
    lambda args: read_row_settings(args, int(args.n_samples_per_prompt)),
    lambda args: check_masks(read_mask_settings(args)),
    lambda args: start_payload(args, job_id="", skip_instance_ids=(), fresh=False, start_id=""),
    _read_eval_sets,
)
"""The functions that read slime's arguments during a rollout; each raises a ConfigError for an invalid argument."""
