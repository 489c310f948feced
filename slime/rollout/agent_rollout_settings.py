"""What the trainer's arguments mean for an agent rollout: settings, the job's name, the payload that starts it.

Reads slime's own arguments by their own names. What slime has no flag for is an attribute that ``--custom-config-path``
sets, each with a default here:

    rollout_buffer_job_id        name of the job; derived from save path, task type, input and sampling when not set
    rollout_buffer_on_exhausted  ``error`` (default) or ``repeat``: what happens when the input is used up
    rollout_buffer_short_groups  ``refill`` (default): other groups fill the places of a batch that could not be
                                 played; ``keep``: dummies stay in them, which make slime's mean smaller
    rollout_buffer_on_policy     true: a rollout's groups are played by the weights of its start alone (false)
    rollout_buffer_exact_prompts  ``report`` (default) or ``require``: an engine that changes prompts, or does not say
                                 what it runs, is refused at the start
    rollout_buffer_options       extra keys of the start payload: timeouts, ratios, what the generator understands
    rollout_buffer_token         bearer token; the environment's ROLLOUT_BUFFER_TOKEN when not set
    rollout_buffer_wait_s        how long one poll waits for a group (20)
    rollout_buffer_lease_s       how long a delivery may stay unacknowledged before it comes back (600)
    rollout_buffer_timeout_s     how long one call may take beyond that (100)
    rollout_buffer_image_cache_mb   fetched screenshots that are kept for the next delivery, in MB (512)
    rollout_buffer_image_fetches    screenshots fetched at once (16)
    rollout_buffer_image_threads    threads that make tensors of them (2)
    rollout_buffer_images           ``pixels`` (default): a vision model's processor makes its tensors, or the run stops
                                    with what is missing; ``tokens``: rows keep one placeholder for each
    rollout_buffer_keep_images      true puts the pictures into ``Sample.multimodal_inputs`` as well (false)
    rollout_buffer_pixel_dtype      float32 or bfloat16; what the image processor makes when not set
    rollout_buffer_report_drift  false: do not count in ``rollout/token_drift/*`` what re-tokenising would change (true)
    rollout_buffer_report_rows   rows of a rank that ``post_process_rollout_data`` reports to the buffer each step (64)
    rollout_buffer_loss_mask     a loss mask of one's own: module:Class, /path/file.py:Class, or a module (none)
    rollout_buffer_max_row_tokens  most tokens in all rows of a trajectory that is rebuilt from its messages (no bound)
    rollout_buffer_turn_discount  rewards of turns are trained, where trajectories have them, and this is what the turn
                                 after counts: 1 is undiscounted (not set: the trajectory's reward alone)
    rollout_buffer_max_token_lag  tokens of weights so many versions older than the trainer's are trained, and those of
                                 older ones masked (no bound)
    rollout_buffer_example_interval  rollouts between two tables of example trajectories; 0 makes none (10)
    rollout_buffer_metrics_file  JSONL file that gets a line of metrics for each rollout
    rollout_buffer_tensorboard_dir  folder for TensorBoard events
    rollout_num_process          episodes played at once (100), or auto
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

from slime.utils.mask_token_records import ROUTED_EXPERTS, TOP_P_TOKENS
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.settings import FeedSettings, ImageSettings, RowSettings, TrackingSettings
from slime_plugins.rollout_buffer.trainer.training_reports import ROWS_OF_A_REPORT

logger = logging.getLogger(__name__)

ADVANTAGE_PATH = "slime.rollout.agent_rollout.turn_advantages"
"""What ``--custom-advantage-function-path`` names where rewards of turns are trained."""
OLD_URL_FLAG = "--agent-rollout-buffer-url"
DEFAULT_NUM_EPOCH = 3
DEFAULT_NUM_PROCESS = 100
DEFAULT_IMAGE_CACHE_MB = 512.0
DEFAULT_IMAGE_FETCHES = 16
DEFAULT_EXAMPLE_INTERVAL = 10
DEFAULT_IMAGE_THREADS = 2
IMAGES = ("pixels", "tokens")
PIXEL_DTYPES = ("float32", "bfloat16")


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
"""Every ``rollout_buffer_…`` attribute that is read; another one is a slip, which slime takes in silence."""


class OnExhausted(StrEnum):
    """What a rollout does when every group of its job was handed out and it still needs more."""

    ERROR = "error"  # says so and stops
    REPEAT = "repeat"  # plays the whole input again, as a job of its own


class ShortGroups(StrEnum):
    """What happens to the places of a batch whose trajectories could not be played."""

    REFILL = "refill"  # other groups fill them
    KEEP = "keep"  # dummies stay in them


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings(FeedSettings):
    """What one trainer wants of the buffer."""

    groups_per_rollout: int
    samples_per_group: int
    on_exhausted: OnExhausted
    pause_between_rollouts: bool
    on_policy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One evaluation set: its name in the metrics, its file, and how it is sampled.

    ``more_sampling`` holds what slime's own evaluation sends beside: top_k, stops and the like, where they are set.
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
        ConfigError: the buffer's URL is missing, a ``rollout_buffer_…`` key is not known, or a value means nothing.
    """
    if getattr(args, "reward_key", None):
        raise ConfigError("--reward-key picks a part of a reward, and the rewards of a rollout buffer are numbers")
    _refuse_unknown_keys(args)
    retries = int(getattr(args, "fetch_trajectory_retry_times", -1))
    return RolloutSettings(
        buffer_url=_buffer_url(args),
        token=buffer_token(args),
        job_id=getattr(args, "rollout_buffer_job_id", None) or _derived_job_id(args),
        groups_per_rollout=_at_least_one(args, "rollout_batch_size"),
        samples_per_group=_at_least_one(args, "n_samples_per_prompt"),
        max_failures=None if retries < 0 else retries,
        on_exhausted=_on_exhausted(args),
        wait_s=_seconds(args, "rollout_buffer_wait_s", 20.0),
        lease_s=_seconds(args, "rollout_buffer_lease_s", 600.0),
        timeout_s=_seconds(args, "rollout_buffer_timeout_s", 100.0),
        pause_between_rollouts=bool(getattr(args, "offload_rollout", False)),
        on_policy=_on_policy(args),
    )


def read_image_settings(args: Any) -> ImageSettings | None:
    """Reads from slime's arguments how screenshots reach the trainer; None: as tokens alone.

    Raises:
        ConfigError: a setting has a value that means nothing.
    """
    pixel_dtype = getattr(args, "rollout_buffer_pixel_dtype", None)
    if pixel_dtype not in (None, *PIXEL_DTYPES):
        raise ConfigError(f"rollout_buffer_pixel_dtype is {pixel_dtype!r}; use {' or '.join(PIXEL_DTYPES)}")
    images = getattr(args, "rollout_buffer_images", None) or IMAGES[0]
    if images not in IMAGES:
        raise ConfigError(f"rollout_buffer_images is {images!r}; use {' or '.join(IMAGES)}")
    if images == "tokens":
        return None
    cache_mb = getattr(args, "rollout_buffer_image_cache_mb", None)
    return ImageSettings(
        cache_bytes=int(1e6 * (DEFAULT_IMAGE_CACHE_MB if cache_mb is None else float(cache_mb))),
        fetches_at_once=max(1, int(getattr(args, "rollout_buffer_image_fetches", None) or DEFAULT_IMAGE_FETCHES)),
        threads=max(1, int(getattr(args, "rollout_buffer_image_threads", None) or DEFAULT_IMAGE_THREADS)),
        pixel_dtype=pixel_dtype,
    )


def read_row_settings(args: Any, samples_per_group: int) -> RowSettings:
    """Reads from slime's arguments how trajectories become training rows.

    Raises:
        ConfigError: ``rollout_buffer_loss_mask`` is no text, or a discount or lag means nothing.
    """
    return RowSettings(
        samples_per_group=samples_per_group,
        masks=read_mask_settings(args),
        max_row_tokens=getattr(args, "rollout_buffer_max_row_tokens", None),
        report_drift=bool(getattr(args, "rollout_buffer_report_drift", True)),
        keep_pictures=bool(getattr(args, "rollout_buffer_keep_images", False)),
        log_probs_wanted_by=log_probs_wanted_by(args),
        turn_discount=read_turn_discount(args),
        max_token_lag=_max_token_lag(args),
        records=wanted_records(args),
        experts_width=_experts_width(args),
    )


def wanted_records(args: Any) -> tuple[str, ...]:
    """Returns what slime's loss and its replay want of each token beside its log-prob."""
    replays = getattr(args, "use_rollout_routing_replay", False)
    return (*([ROUTED_EXPERTS] if replays else []), *([TOP_P_TOKENS] if replays_top_p(args) else []))


def asked_records(args: Any) -> dict[str, Any]:
    """Returns the sampling parameters that ask the engine for what slime wants of each token."""
    asked: dict[str, Any] = {}
    if TOP_P_TOKENS in wanted_records(args):
        asked["custom_params"] = {"return_top_p_token_ids": True}
    if ROUTED_EXPERTS in wanted_records(args):
        asked["return_routed_experts"] = True
    return asked


def replays_top_p(args: Any) -> bool:
    """True if slime computes log-probs over the ids that top_p kept: those of 2026 do, where it keeps not all."""
    knows = any(one.name == "rollout_top_p_token_ids" for one in fields(Sample))
    return knows and getattr(args, "rollout_top_p", 1.0) != 1.0


def _experts_width(args: Any) -> int | None:
    layers, chosen = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    return int(layers) * int(chosen) if layers and chosen else None


def read_turn_discount(args: Any) -> float | None:
    """Reads what the turn after counts; None where rewards of turns are not trained.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    name = "rollout_buffer_turn_discount"
    given = getattr(args, name, None)
    if given is None:
        return 1.0 if getattr(args, "custom_advantage_function_path", None) == ADVANTAGE_PATH else None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ConfigError(f"{name} is {given!r}; use a number from 0 to 1, which is what the turn after counts")
    return float(given)


def _max_token_lag(args: Any) -> int | None:
    value = getattr(args, "rollout_buffer_max_token_lag", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"rollout_buffer_max_token_lag is {value!r}; use a number of weight versions from 0 on")
    return value


def read_mask_settings(args: Any) -> MaskSettings:
    """Reads from slime's arguments how masks are made; a type that names a class is one of the user's own.

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
    """Reads from slime's arguments where metrics go.

    Raises:
        ConfigError: the interval is no number from 0 on.
    """
    interval = getattr(args, "rollout_buffer_example_interval", None)
    interval = DEFAULT_EXAMPLE_INTERVAL if interval is None else interval
    if not isinstance(interval, int) or interval < 0:
        raise ConfigError(f"rollout_buffer_example_interval is {interval!r}; use a number of rollouts, or 0 for none")
    json_lines = getattr(args, "rollout_buffer_metrics_file", None)
    tensorboard = getattr(args, "rollout_buffer_tensorboard_dir", None)
    return TrackingSettings(
        use_wandb=bool(getattr(args, "use_wandb", False)),
        json_lines=Path(json_lines) if json_lines else None,
        tensorboard=Path(tensorboard) if tensorboard else None,
        example_interval=interval,
    )


def log_probs_wanted_by(args: Any) -> str | None:
    """Returns the flag with which slime computes its loss from the engine's log-probs; None where it does not."""
    given = (getattr(args, name, False) for name in ("use_rollout_logprobs", "use_tis", "get_mismatch_metrics"))
    flags = ("--use-rollout-logprobs", "--use-tis", "--get-mismatch-metrics")
    return next((flag for flag, is_set in zip(flags, given, strict=True) if is_set), None)


def buffer_token(args: Any) -> str | None:
    """Returns the bearer token of the buffer, None when there is none."""
    return getattr(args, "rollout_buffer_token", None) or os.environ.get("ROLLOUT_BUFFER_TOKEN") or None


def start_payload(
    args: Any, *, job_id: str, skip_instance_ids: Sequence[str], fresh: bool, start_id: str
) -> dict[str, Any]:
    """Returns the body of ``start_rollout`` for training.

    ``fresh`` asks for a new job even when one of that id exists; a repeated call with the same ``start_id`` is the same
    start, so a lost reply never starts twice.

    Raises:
        ConfigError: ``rollout_buffer_options`` would change a key that slime's own arguments set.
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
    """Returns the body of ``start_rollout`` that plays an evaluation set once, always again.

    A group that some members could not be played of is measured by the others, whatever ratios training asks for.

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
        ConfigError: there are none, or the list is not name and path in turn.
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
        **_exact_prompts(args),
    }


def _exact_prompts(args: Any) -> dict[str, str]:
    value = getattr(args, "rollout_buffer_exact_prompts", None)
    if value not in (None, "report", "require"):
        raise ConfigError(f"rollout_buffer_exact_prompts is {value!r}; use report or require")
    return {} if value is None else {"exact_prompts": value}


def _num_process(value: Any) -> int | str:
    """A number, or ``auto``; the buffer refuses what is neither."""
    return "auto" if value == "auto" else int(value)


def engine_url(args: Any) -> str | None:
    """Returns the router's address; an IPv6 one stands in brackets in a URL, and slime passes it with or without."""
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
    """Returns the sampling parameters that are set; a ``top_k`` of -1 is none."""
    return {key: value for key, value in values.items() if value is not None and (key, value) != ("top_k", -1)}


def _with_options(payload: dict[str, Any], args: Any) -> dict[str, Any]:
    options = getattr(args, "rollout_buffer_options", None) or {}
    if not isinstance(options, Mapping):
        raise ConfigError("rollout_buffer_options must be a mapping of payload keys to values")
    if isinstance(nested := getattr(args, "actor_rollout_ref", None), Mapping):
        options = {"actor_rollout_ref": nested, **options}  # a config in the layout of StateLM's own description
    clash = sorted(payload.keys() & options.keys())
    if clash:
        raise ConfigError(f"rollout_buffer_options may not set {', '.join(clash)}: slime's own arguments do")
    return {**payload, **options}


def _plays_ahead(args: Any) -> dict[str, int]:
    """Returns how far a job plays ahead of the trainer.

    On-policy: one rollout's groups and no other before they are taken. Else new groups begin while fewer than one
    rollout's groups are ready: with those that play meanwhile, about two rollouts are ahead of a trainer that is slower
    than the devices, and none of a quicker one waits.
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
    """Names the work: the same after a restart from the same save path, another one when the work changes."""
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
            "ignores, stands on no command line that can be read here"
        )
    if not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"--rollout-buffer-url is {url!r}; it must start with http:// or https://")
    return str(url).rstrip("/")


def _url_on_the_command_line() -> str | None:
    """Returns the value of the older flag, which slime's parser ignores without a word: last given, first obeyed."""
    own = subprocess.list2cmdline(sys.argv)
    return next(filter(None, map(_old_flag_in, (own, _drivers_command_line()))), None)


def _old_flag_in(command_line: str) -> str | None:
    found = re.findall(rf'{OLD_URL_FLAG}(?:=|\s+)"?(?!--)([^\s"]+)', command_line)
    return found[-1] if found else None


def _drivers_command_line() -> str:
    """Returns how the training was started; '' outside Ray.

    slime calls a rollout function in an actor, whose own command line is that of a Ray worker. Ray keeps the driver's
    with the job.
    """
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return ""
        job_id = ray.get_runtime_context().get_job_id()
        jobs = importlib.import_module("ray._private.state").jobs()
        return next((str(job.get("Entrypoint") or "") for job in jobs if job["JobID"] == job_id), "")
    except Exception as error:  # noqa: BLE001 - Ray has no public name for it; the sentence about the URL must come
        logger.info("the command line of the training cannot be read from Ray: %r", error)
        return ""


def _on_exhausted(args: Any) -> OnExhausted:
    value = getattr(args, "rollout_buffer_on_exhausted", None) or OnExhausted.ERROR
    try:
        return OnExhausted(value)
    except ValueError as error:
        raise ConfigError(f"rollout_buffer_on_exhausted is {value!r}; use error or repeat") from error


def read_report_rows(args: Any) -> int:
    """Reads of how many rows of a rank each step is reported to the buffer; 0 is none.

    Raises:
        ConfigError: it is below 0.
    """
    rows = int(_or_default(getattr(args, "rollout_buffer_report_rows", None), ROWS_OF_A_REPORT))
    if rows < 0:
        raise ConfigError(f"rollout_buffer_report_rows is {rows}; it must be at least 0")
    return rows


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def read_short_groups(args: Any) -> ShortGroups:
    """Reads what becomes of the places of a batch that could not be played.

    Raises:
        ConfigError: the value is none of the two.
    """
    value = getattr(args, "rollout_buffer_short_groups", None) or ShortGroups.REFILL
    try:
        return ShortGroups(value)
    except ValueError as error:
        raise ConfigError(f"rollout_buffer_short_groups is {value!r}; use refill or keep") from error


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
