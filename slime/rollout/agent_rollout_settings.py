"""Reads the settings of an agent rollout from slime's arguments: polling, the job's id, and the payload that starts it.

Attributes without a flag in slime are set in the file of ``--custom-config-path``, each with a default here:

    rollout_buffer_job_id        name of the job; derived from save path, task type, input and sampling when not set
    rollout_buffer_on_exhausted  ``error`` (default) or ``repeat``: what happens when the input is used up
    rollout_buffer_short_groups  ``refill`` (default): other groups replace members that could not be played; ``keep``:
                                 dummies replace them, which reduces slime's mean
    rollout_buffer_on_policy     true: a rollout's groups are sampled only by the weights at its start (false)
    rollout_buffer_exact_prompts  ``report`` (default) or ``require``: an engine that changes prompts, or does not
                                 report the ids that it runs, is refused at the start
    rollout_buffer_options       further keys of the start payload: timeouts, ratios, options of the generator
    rollout_buffer_token         bearer token; by default ROLLOUT_BUFFER_TOKEN of the environment
    rollout_buffer_wait_s        seconds that one poll waits for a group (20)
    rollout_buffer_lease_s       seconds until a delivery that is not acknowledged is redelivered (600)
    rollout_buffer_timeout_s     seconds that one call may take in addition to rollout_buffer_wait_s (100)
    rollout_buffer_image_cache_mb   cache of fetched screenshots, in MB (512)
    rollout_buffer_image_fetches    concurrent downloads of screenshots (16)
    rollout_buffer_image_threads    threads that convert screenshots to tensors (2)
    rollout_buffer_images           ``pixels`` (default): a vision model gets tensors of screenshots, and the run fails
                                    if one is missing; ``tokens``: rows keep one placeholder for each
    rollout_buffer_keep_images      true also puts the images into ``Sample.multimodal_inputs`` (false)
    rollout_buffer_pixel_dtype      float32 or bfloat16; by default that of the image processor
    rollout_buffer_report_drift  count in ``rollout/token_drift/*`` how re-tokenising would change tokens (true)
    rollout_buffer_report_rows   rows of a rank that ``post_process_rollout_data`` reports to the buffer each step (64)
    rollout_buffer_loss_mask     a custom loss mask: module:Class, /path/file.py:Class, or a module (none)
    rollout_buffer_max_row_tokens  limit of tokens in all rows of a trajectory rebuilt from its messages (none)
    rollout_buffer_turn_discount  trains rewards of turns, with this discount from turn to turn: 1 is undiscounted (not
                                 set: only the trajectory's reward)
    rollout_buffer_max_token_lag  masks tokens whose weights are more versions older than the trainer's (no limit)
    rollout_buffer_example_interval  rollouts between two tables of example trajectories; 0 logs none (10)
    rollout_buffer_metrics_file  JSONL file that gets a line of metrics for each rollout
    rollout_buffer_tensorboard_dir  folder for TensorBoard events
    rollout_num_process          concurrent episodes (100), or auto
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.client import DEFAULT_TIMEOUT_S
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.settings import (
    DEFAULT_LEASE_S,
    DEFAULT_WAIT_S,
    FeedSettings,
    ImageSettings,
    RowSettings,
    TrackingSettings,
)
from slime_plugins.rollout_buffer.trainer.training_reports import MAX_ROWS_PER_REPORT

logger = logging.getLogger(__name__)

ADVANTAGE_PATH = "slime.rollout.agent_rollout.turn_advantages"
"""Value of ``--custom-advantage-function-path`` that trains rewards of turns."""
OLD_URL_FLAG = "--agent-rollout-buffer-url"
DEFAULT_NUM_EPOCH = 3
DEFAULT_NUM_PROCESS = 100
DEFAULT_IMAGE_CACHE_MB = 512.0
DEFAULT_IMAGE_FETCHES = 16
DEFAULT_EXAMPLE_INTERVAL = 10
DEFAULT_IMAGE_THREADS = 2


KEYS = frozenset(
    {"rollout_buffer_exact_prompts", "rollout_buffer_image_threads", "rollout_buffer_images"}
    | {"rollout_buffer_example_interval", "rollout_buffer_image_cache_mb", "rollout_buffer_image_fetches"}
    | {"rollout_buffer_job_id", "rollout_buffer_keep_images", "rollout_buffer_lease_s", "rollout_buffer_loss_mask"}
    | {"rollout_buffer_max_row_tokens", "rollout_buffer_metrics_file", "rollout_buffer_on_exhausted"}
    | {"rollout_buffer_max_token_lag", "rollout_buffer_on_policy", "rollout_buffer_turn_discount"}
    | {"rollout_buffer_options", "rollout_buffer_pixel_dtype", "rollout_buffer_ray_address"}
    | {"rollout_buffer_report_drift", "rollout_buffer_report_rows", "rollout_buffer_short_groups"}
    | {"rollout_buffer_tensorboard_dir"}
    | {"rollout_buffer_timeout_s", "rollout_buffer_token", "rollout_buffer_url", "rollout_buffer_wait_s"}
)
"""Every ``rollout_buffer_…`` attribute that is read; others are refused, because slime accepts any key."""


class OnExhausted(StrEnum):
    """What a rollout does if all groups of its job were delivered and it needs more."""

    ERROR = "error"
    REPEAT = "repeat"  # plays the whole input again, as a new job


class ShortGroups(StrEnum):
    """How members of a batch that could not be played are replaced."""

    REFILL = "refill"  # by members of other groups
    KEEP = "keep"  # by dummies


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings(FeedSettings):
    """Settings of training rollouts."""

    groups_per_rollout: int
    samples_per_group: int
    on_exhausted: OnExhausted
    pause_between_rollouts: bool
    on_policy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One evaluation set: its name in the metrics, its file, and its sampling parameters.

    ``more_sampling`` has the further sampling parameters that slime's evaluation sends (top_k, stop …), if set.
    """

    name: str
    path: str
    samples_per_group: int
    max_tokens: int
    temperature: float
    top_p: float
    more_sampling: Mapping[str, Any] = field(default_factory=dict)


def read_settings(args: Any) -> RolloutSettings:
    """Reads the settings from slime's arguments.

    Raises:
        ConfigError: the buffer's URL is missing, a ``rollout_buffer_…`` key is unknown, or a value is invalid.
    """
    if getattr(args, "reward_key", None):
        raise ConfigError("--reward-key selects a part of a reward, and the rewards of a rollout buffer are numbers")
    _refuse_unknown_keys(args)
    retries = int(getattr(args, "fetch_trajectory_retry_times", -1))
    return RolloutSettings(
        buffer_url=_buffer_url(args),
        token=buffer_token(args),
        job_id=getattr(args, "rollout_buffer_job_id", None) or _derived_job_id(args),
        groups_per_rollout=_at_least_one(args, "rollout_batch_size"),
        samples_per_group=_at_least_one(args, "n_samples_per_prompt"),
        max_failures=None if retries < 0 else retries,
        on_exhausted=OnExhausted(_choice(args, "rollout_buffer_on_exhausted", list(OnExhausted)) or OnExhausted.ERROR),
        wait_s=_seconds(args, "rollout_buffer_wait_s", DEFAULT_WAIT_S),
        lease_s=_seconds(args, "rollout_buffer_lease_s", DEFAULT_LEASE_S),
        timeout_s=_seconds(args, "rollout_buffer_timeout_s", DEFAULT_TIMEOUT_S),
        pause_between_rollouts=bool(getattr(args, "offload_rollout", False)),
        on_policy=_on_policy(args),
    )


def read_image_settings(args: Any) -> ImageSettings | None:
    """Reads the image settings from slime's arguments; None if rows keep placeholders only.

    Raises:
        ConfigError: a value is invalid.
    """
    pixel_dtype = _choice(args, "rollout_buffer_pixel_dtype", ("float32", "bfloat16"))
    if _choice(args, "rollout_buffer_images", ("pixels", "tokens")) == "tokens":
        return None
    cache_mb = getattr(args, "rollout_buffer_image_cache_mb", None)
    return ImageSettings(
        cache_bytes=int(1e6 * (DEFAULT_IMAGE_CACHE_MB if cache_mb is None else float(cache_mb))),
        fetches_at_once=max(1, int(getattr(args, "rollout_buffer_image_fetches", None) or DEFAULT_IMAGE_FETCHES)),
        threads=max(1, int(getattr(args, "rollout_buffer_image_threads", None) or DEFAULT_IMAGE_THREADS)),
        pixel_dtype=pixel_dtype,
    )


def read_row_settings(args: Any, samples_per_group: int) -> RowSettings:
    """Reads the row settings from slime's arguments.

    Raises:
        ConfigError: ``rollout_buffer_loss_mask`` is no text, or a discount or lag is invalid.
    """
    return RowSettings(
        samples_per_group=samples_per_group,
        masks=read_mask_settings(args),
        max_row_tokens=getattr(args, "rollout_buffer_max_row_tokens", None),
        report_drift=bool(getattr(args, "rollout_buffer_report_drift", True)),
        keep_pictures=bool(getattr(args, "rollout_buffer_keep_images", False)),
        log_probs_wanted_by=log_probs_wanted_by(args),
        turn_discount=read_turn_discount(args),
        max_token_lag=_count(args, "rollout_buffer_max_token_lag"),
        records=wanted_records(args),
        experts_width=_experts_width(args),
    )


def wanted_records(args: Any) -> tuple[str, ...]:
    """Returns the kinds of token records that slime's loss and its routing replay need."""
    replays = getattr(args, "use_rollout_routing_replay", False)
    return (*([ROUTED_EXPERTS] if replays else []), *([TOP_P_TOKENS] if replays_top_p(args) else []))


def asked_records(args: Any) -> dict[str, Any]:
    """Returns the sampling parameters that request these token records from the engine."""
    asked: dict[str, Any] = {}
    if TOP_P_TOKENS in wanted_records(args):
        asked["custom_params"] = {"return_top_p_token_ids": True}
    if ROUTED_EXPERTS in wanted_records(args):
        asked["return_routed_experts"] = True
    return asked


def replays_top_p(args: Any) -> bool:
    """Returns True if slime computes log-probs over the top-p ids: versions of 2026 do, for a top_p below 1."""
    knows = any(one.name == "rollout_top_p_token_ids" for one in fields(Sample))
    return knows and getattr(args, "rollout_top_p", 1.0) != 1.0


def _experts_width(args: Any) -> int | None:
    layers, chosen = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    return int(layers) * int(chosen) if layers and chosen else None


def read_turn_discount(args: Any) -> float | None:
    """Reads the discount of turns; None if rewards of turns are not trained.

    Raises:
        ConfigError: it is not a number from 0 to 1.
    """
    name = "rollout_buffer_turn_discount"
    given = getattr(args, name, None)
    if given is None:
        return 1.0 if getattr(args, "custom_advantage_function_path", None) == ADVANTAGE_PATH else None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ConfigError(f"{name} is {given!r}; use a number from 0 to 1, the weight of the next turn's return")
    return float(given)


def read_mask_settings(args: Any) -> MaskSettings:
    """Reads the mask settings from slime's arguments; a type that names a class is a custom mask.

    Raises:
        ConfigError: ``rollout_buffer_loss_mask`` is no text.
    """
    loss_mask_type = getattr(args, "loss_mask_type", None) or "qwen"
    source = getattr(args, "rollout_buffer_loss_mask", None) or None
    if source is not None and not isinstance(source, str):
        raise ConfigError(f"rollout_buffer_loss_mask is {source!r}; name a class: module:Class or /path/file.py:Class")
    if source is None and (":" in loss_mask_type or loss_mask_type.endswith(".py")):
        source, loss_mask_type = loss_mask_type, "qwen"
    options = getattr(args, "apply_chat_template_kwargs", None) or {}
    return MaskSettings(
        tokenizer_path=getattr(args, "hf_checkpoint", None),
        loss_mask_type=loss_mask_type,
        source=source,
        chat_template_kwargs=json.dumps(options, sort_keys=True, default=str),
    )


def read_tracking_settings(args: Any) -> TrackingSettings:
    """Reads the sinks of metrics from slime's arguments.

    Raises:
        ConfigError: the interval is no number from 0 on.
    """
    interval = _count(args, "rollout_buffer_example_interval")
    json_lines = getattr(args, "rollout_buffer_metrics_file", None)
    tensorboard = getattr(args, "rollout_buffer_tensorboard_dir", None)
    return TrackingSettings(
        use_wandb=bool(getattr(args, "use_wandb", False)),
        json_lines=Path(json_lines) if json_lines else None,
        tensorboard=Path(tensorboard) if tensorboard else None,
        example_interval=DEFAULT_EXAMPLE_INTERVAL if interval is None else interval,
    )


def log_probs_wanted_by(args: Any) -> str | None:
    """Returns the flag that makes slime compute its loss from the engine's log-probs; None if none is set."""
    given = (getattr(args, name, False) for name in ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics"))
    flags = ("--use-rollout-logprobs", "--use-tis", "--get-mismatch-metrics")
    return next((flag for flag, is_set in zip(flags, given, strict=True) if is_set), None)


def trains_without_log_probs(args: Any) -> bool:
    """Returns True if slime computes no log-probs before the loss, with one step per rollout and no KL penalty."""
    if any(getattr(args, name, False) for name in ("use_critic", "keep_old_actor", "use_opd")):
        return False
    if getattr(args, "loss_type", None) != "policy_loss" or getattr(args, "kl_coef", None) != 0:
        return False
    return trajectories_of_rollout(args) // step_size(args) <= 1


def trajectories_of_rollout(args: Any) -> int:
    return int(args.rollout_batch_size) * int(args.n_samples_per_prompt)


def step_size(args: Any) -> int:
    """Returns the number of trajectories in one step of the optimizer."""
    return int(getattr(args, "global_batch_size", None) or trajectories_of_rollout(args))


def buffer_token(args: Any) -> str | None:
    return getattr(args, "rollout_buffer_token", None) or os.environ.get("ROLLOUT_BUFFER_TOKEN") or None


def start_payload(
    args: Any, *, job_id: str, skip_instance_ids: Sequence[str], fresh: bool, start_id: str
) -> dict[str, Any]:
    """Returns the body of ``start_rollout`` for training.

    ``fresh`` starts a new job even if one of that id exists. A repeated request with the same ``start_id`` is the same
    start, so that it may be retried after a lost reply.

    Raises:
        ConfigError: ``rollout_buffer_options`` contains a key that slime's arguments set.
    """
    payload = {
        **_engine_and_task(args),
        "num_epoch": int(getattr(args, "num_epoch", None) or DEFAULT_NUM_EPOCH),
        "input_file": args.prompt_data,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),
        "max_tokens": args.rollout_max_response_len,
        "sampling_params": _sampling_params(args),
        "skip_instance_ids": list(skip_instance_ids),
        "job_id": job_id,
        "fresh": fresh,
        "start_id": start_id,
    }
    return {**_plays_ahead(args), **_with_options(payload, args)}


def eval_payload(args: Any, eval_set: EvalSet, *, job_id: str, start_id: str) -> dict[str, Any]:
    """Returns the body of ``start_rollout`` that plays an evaluation set once, as a new job.

    Groups with missing members are delivered with the others, regardless of the ratios that training requires.

    Raises:
        ConfigError: as ``start_payload``.
    """
    sampling_params = {
        "max_tokens": eval_set.max_tokens,
        "temperature": eval_set.temperature,
        "top_p": eval_set.top_p,
        **eval_set.more_sampling,
    }
    payload = {
        **_engine_and_task(args),
        "num_epoch": 1,
        "input_file": eval_set.path,
        "num_repeat_per_sample": str(eval_set.samples_per_group),
        "max_tokens": eval_set.max_tokens,
        "sampling_params": sampling_params,
        "skip_instance_ids": [],
        "job_id": job_id,
        "fresh": True,
        "start_id": start_id,
        "evaluation": True,
    }
    return {**_with_options(payload, args), "min_timeout_group_size_ratio": 0, "min_valid_item_size_ratio": 0}


def eval_sets(args: Any) -> list[EvalSet]:
    """Returns the evaluation sets: slime's resolved ``eval_datasets``, else the pairs of ``--eval-prompt-data``.

    Raises:
        ConfigError: there are none, or the list does not consist of pairs of name and path.
    """
    datasets = getattr(args, "eval_datasets", None)
    if datasets:
        return [_eval_set(args, dataset.name, dataset.path, dataset) for dataset in datasets]
    values = list(getattr(args, "eval_prompt_data", None) or [])
    if len(values) == 1:
        values = ["eval", *values]
    if not values or len(values) % 2:
        raise ConfigError("an evaluation needs --eval-prompt-data NAME PATH [NAME PATH ...]")
    return [_eval_set(args, name, path, None) for name, path in zip(values[::2], values[1::2], strict=True)]


def _eval_set(args: Any, name: str, path: str, dataset: Any) -> EvalSet:
    def value(of_set: str, *of_args: str) -> Any:
        found = [getattr(dataset, of_set, None), *(getattr(args, attribute, None) for attribute in of_args)]
        return next((entry for entry in found if entry is not None), None)

    return EvalSet(
        name=name,
        path=path,
        samples_per_group=int(value("n_samples_per_eval_prompt", "n_samples_per_eval_prompt") or 1),
        max_tokens=int(value("max_response_len", "eval_max_response_len", "rollout_max_response_len")),
        temperature=float(value("temperature", "eval_temperature", "rollout_temperature")),
        top_p=float(value("top_p", "eval_top_p", "rollout_top_p")),
        more_sampling=_set_values(
            top_k=value("top_k", "eval_top_k", "rollout_top_k"),
            min_new_tokens=value("min_new_tokens", "eval_min_new_tokens"),
            repetition_penalty=value("repetition_penalty"),
            stop=value("stop", "rollout_stop"),
            stop_token_ids=value("stop_token_ids", "rollout_stop_token_ids"),
        ),
    )


def _refuse_unknown_keys(args: Any) -> None:
    for name in sorted(vars(args)):
        if name.startswith("rollout_buffer_") and name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name} is not known; did you mean {near}?")


def _engine_and_task(args: Any) -> dict[str, Any]:
    return {
        "num_process": _num_process(getattr(args, "rollout_num_process", None) or DEFAULT_NUM_PROCESS),
        "remote_engine_url": engine_url(args),
        "remote_buffer_url": _buffer_url(args),
        "task_type": args.rollout_task_type,
        "tokenizer_path": args.hf_checkpoint,
        **_set_values(exact_prompts=_choice(args, "rollout_buffer_exact_prompts", ("report", "require"))),
    }


def _num_process(value: Any) -> int | str:
    return "auto" if value == "auto" else int(value)


def engine_url(args: Any) -> str | None:
    """Returns the router's URL; slime passes an IPv6 address with or without brackets."""
    address = getattr(args, "sglang_router_ip", None)
    if address is None:
        return None
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"http://{host}:{args.sglang_router_port}"


def _sampling_params(args: Any) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": args.rollout_max_response_len,
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
    }
    optional = _set_values(
        top_k=getattr(args, "rollout_top_k", None),
        stop=getattr(args, "rollout_stop", None),
        stop_token_ids=getattr(args, "rollout_stop_token_ids", None),
    )
    return {**params, **optional, **asked_records(args)}


def _set_values(**values: Any) -> dict[str, Any]:
    """Returns the values that are set; a ``top_k`` of -1 is none."""
    return {key: value for key, value in values.items() if value is not None and (key, value) != ("top_k", -1)}


def _with_options(payload: dict[str, Any], args: Any) -> dict[str, Any]:
    options = getattr(args, "rollout_buffer_options", None) or {}
    if not isinstance(options, Mapping):
        raise ConfigError("rollout_buffer_options must be a mapping of payload keys to values")
    if isinstance(nested := getattr(args, "actor_rollout_ref", None), Mapping):
        options = {"actor_rollout_ref": nested, **options}  # a config in StateLM's layout
    clash = sorted(payload.keys() & options.keys())
    if clash:
        raise ConfigError(f"rollout_buffer_options may not set {', '.join(clash)}: slime's arguments set it")
    return {**payload, **options}


def _plays_ahead(args: Any) -> dict[str, int]:
    """Returns the payload's limit of the groups that a job plays ahead of the trainer.

    On-policy: only the groups of one rollout. Otherwise new groups begin while fewer than one rollout's groups are
    ready: with the running ones, a trainer that is slower than the devices has about two rollouts ahead, and a quicker
    one has none waiting.
    """
    groups = int(args.rollout_batch_size)
    if _on_policy(args):
        return {"max_groups_ahead": groups}
    if "max_groups_ready" in (getattr(args, "rollout_buffer_options", None) or {}):
        return {}
    return {"max_groups_ready": groups}


def _on_policy(args: Any) -> bool:
    value = getattr(args, "rollout_buffer_on_policy", None) or False
    if not isinstance(value, bool):
        raise ConfigError(f"rollout_buffer_on_policy is {value!r}; use true or false")
    if value and "max_groups_ahead" in (getattr(args, "rollout_buffer_options", None) or {}):
        raise ConfigError("rollout_buffer_on_policy plays one rollout ahead: leave max_groups_ahead out of the options")
    return value


def _derived_job_id(args: Any) -> str:
    """Derives an id that is equal after a restart with the same save path and settings."""
    work = {
        "save": getattr(args, "save", None) or getattr(args, "load", None),
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "num_epoch": getattr(args, "num_epoch", None) or DEFAULT_NUM_EPOCH,
        "samples_per_group": args.n_samples_per_prompt,
        "sampling_params": _sampling_params(args),
        "options": dict(getattr(args, "rollout_buffer_options", None) or {}),
    }
    canonical = json.dumps(work, sort_keys=True, default=str)
    return f"{args.rollout_task_type}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def _buffer_url(args: Any) -> str:
    given = getattr(args, "agent_rollout_buffer_url", None) or getattr(args, "rollout_buffer_url", None)
    url = given or _url_on_the_command_line()
    if not url:
        raise ConfigError(
            "the trainer does not know its buffer: set --rollout-buffer-url http://HOST:8889, or "
            f"agent_rollout_buffer_url in the file of --custom-config-path; {OLD_URL_FLAG}, which slime's parser "
            "ignores, was not found on the command line either"
        )
    if not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"--rollout-buffer-url is {url!r}; it must start with http:// or https://")
    return str(url).rstrip("/")


def _url_on_the_command_line() -> str | None:
    """Returns the last value of the older flag, which slime's parser ignores, on the command line of the training."""
    own = subprocess.list2cmdline(sys.argv)
    return next(filter(None, map(_old_flag_in, (own, _drivers_command_line()))), None)


def _old_flag_in(command_line: str) -> str | None:
    found = re.findall(rf'{OLD_URL_FLAG}(?:=|\s+)"?(?!--)([^\s"]+)', command_line)
    return found[-1] if found else None


def _drivers_command_line() -> str:
    """Returns the driver's command line from Ray's job table; '' outside Ray.

    slime calls a rollout function in an actor, whose own command line is that of a Ray worker.
    """
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return ""
        job_id = ray.get_runtime_context().get_job_id()
        jobs = importlib.import_module("ray._private.state").jobs()
        return next((str(job.get("Entrypoint") or "") for job in jobs if job["JobID"] == job_id), "")
    except Exception as error:  # noqa: BLE001 - Ray has no public API for it; the URL is reported as missing
        logger.info("the command line of the training cannot be read from Ray: %r", error)
        return ""


def _choice(args: Any, name: str, choices: Sequence[str]) -> str | None:
    """Returns the value of an attribute that must be one of ``choices``; None if it is not set."""
    value = getattr(args, name, None) or None
    if value not in (None, *choices):
        raise ConfigError(f"{name} is {value!r}; use {' or '.join(choices)}")
    return value


def read_report_rows(args: Any) -> int:
    """Reads how many rows per rank and step are reported to the buffer; 0 reports none.

    Raises:
        ConfigError: it is below 0.
    """
    rows = _count(args, "rollout_buffer_report_rows")
    return MAX_ROWS_PER_REPORT if rows is None else rows


def _count(args: Any, name: str) -> int | None:
    """Returns the value of an attribute that must be a whole number from 0 on; None if it is not set."""
    value = getattr(args, name, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name} is {value!r}; use a whole number from 0 on")
    return value


def read_short_groups(args: Any) -> ShortGroups:
    """Reads how members that could not be played are replaced.

    Raises:
        ConfigError: the value is unknown.
    """
    return ShortGroups(_choice(args, "rollout_buffer_short_groups", list(ShortGroups)) or ShortGroups.REFILL)


def _at_least_one(args: Any, name: str) -> int:
    value = int(getattr(args, name))
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")
    return value


def _seconds(args: Any, name: str, default: float) -> float:
    value = float(getattr(args, name, None) or default)
    if value <= 0:
        raise ConfigError(f"{name} is {value}; it must be more than 0 seconds")
    return value
