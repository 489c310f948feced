"""Reads the settings of an agent rollout from slime's arguments: polling, the job's id, and the payload that starts it.

What each argument means is in this project's ``docs/arguments.md``.
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
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.client import DEFAULT_TIMEOUT_S
from slime_plugins.rollout_buffer.errors import ConfigError, InvalidPayloadError
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
from slime_plugins.rollout_buffer.types import CHANGEABLE
from slime_plugins.rollout_buffer.wire.checks import MustBe, WireRecord, checked

logger = logging.getLogger(__name__)

ADVANTAGE_PATH = "slime.rollout.agent_rollout.turn_advantages"
"""Value of ``--custom-advantage-function-path`` that trains rewards of turns."""
OLD_URL_FLAG = "--agent-rollout-buffer-url"
PREFIX = "rollout_buffer_"


class OnExhausted(StrEnum):
    """What a rollout does if all groups of its job were delivered and it needs more."""

    ERROR = "error"
    REPEAT = "repeat"  # plays the whole input again, as a new job


class ShortGroups(StrEnum):
    """How members of a batch that could not be played are replaced."""

    REFILL = "refill"  # by members of other groups
    KEEP = "keep"  # by dummies


def _number_of_text(given: Any) -> Any:
    return float(given) if isinstance(given, str) else given  # YAML reads 1e3 as a text


def _secret_text(given: Any) -> str:
    if not isinstance(given, str):
        raise ValueError("must be a text")  # without the value: it may be a token
    return given


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number_of_text)]
Seconds = Annotated[Number, Field(gt=0), MustBe("a number of more than 0 seconds")]
WaitSeconds = Annotated[Seconds, Field(le=300), MustBe("a number of more than 0 and at most 300 seconds")]
LeaseSeconds = Annotated[Seconds, Field(le=604800), MustBe("a number of more than 0 and at most 604800 seconds")]
Whole = Annotated[int, Field(ge=0), MustBe("a whole number of at least 0")]
RowsOfReport = Annotated[Whole, Field(le=1000), MustBe("a whole number from 0 to 1000")]
AtLeastOne = Annotated[int, Field(ge=1), MustBe("a whole number of at least 1")]


class BufferAttributes(WireRecord):
    """The attributes of slime's arguments that only this file reads.

    An attribute that is absent, null or an empty text has its default.
    """

    rollout_buffer_url: str | None = None
    rollout_buffer_token: Annotated[str, BeforeValidator(_secret_text)] | None = None
    rollout_buffer_job_id: str | None = None
    rollout_buffer_options: dict[str, Any] = Field(default_factory=dict)
    rollout_buffer_on_exhausted: Annotated[OnExhausted, Field(strict=False)] = OnExhausted.ERROR
    rollout_buffer_short_groups: Annotated[ShortGroups, Field(strict=False)] = ShortGroups.REFILL
    rollout_buffer_on_policy: bool = False
    rollout_buffer_exact_prompts: Literal["report", "require"] | None = None
    rollout_buffer_wait_s: WaitSeconds = DEFAULT_WAIT_S
    rollout_buffer_lease_s: LeaseSeconds = DEFAULT_LEASE_S
    rollout_buffer_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    rollout_buffer_image_cache_mb: Annotated[Number, Field(ge=0), MustBe("a number of at least 0")] = 512.0
    rollout_buffer_image_fetches: AtLeastOne = 16
    rollout_buffer_image_threads: AtLeastOne = 2
    rollout_buffer_images: Literal["pixels", "tokens"] = "pixels"
    rollout_buffer_keep_images: bool = False
    rollout_buffer_pixel_dtype: Literal["float32", "bfloat16"] | None = None
    rollout_buffer_report_drift: bool = True
    rollout_buffer_report_rows: RowsOfReport = MAX_ROWS_PER_REPORT
    rollout_buffer_loss_mask: str | None = None
    rollout_buffer_max_row_tokens: Whole | None = None
    rollout_buffer_max_token_lag: Whole | None = None
    rollout_buffer_turn_discount: Annotated[Number, Field(ge=0, le=1), MustBe("a number from 0 to 1")] | None = None
    rollout_buffer_example_interval: Whole = 10
    rollout_buffer_metrics_file: str | None = None
    rollout_buffer_tensorboard_dir: str | None = None
    rollout_buffer_ray_address: str | None = None
    rollout_num_process: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)], MustBe("auto or a whole number of at least 1")
    ] = 100
    num_epoch: AtLeastOne = 3
    fetch_trajectory_retry_times: Annotated[int, Field(ge=-1)] = -1


def buffer_attributes(args: Any) -> BufferAttributes:
    """Reads the attributes from slime's arguments.

    Raises:
        ConfigError: attributes are invalid; the message names each.
    """
    values = {name: getattr(args, name, None) for name in BufferAttributes.model_fields}
    given = {name: value for name, value in values.items() if value not in (None, "")}
    try:
        return checked(BufferAttributes.model_validate, given, "")
    except InvalidPayloadError as error:
        raise ConfigError(error.message) from None


KNOWN_ATTRIBUTES = tuple(sorted(name for name in BufferAttributes.model_fields if name.startswith(PREFIX)))


def refuse_unknown_attributes(args: Any) -> None:
    """Raises a ConfigError for a ``rollout_buffer_…`` attribute that nobody reads, also with a misspelt prefix: slime
    accepts any key."""
    # Compared without the common prefix, which would make any two names similar.
    known = [name.removeprefix(PREFIX) for name in KNOWN_ATTRIBUTES]
    for name in sorted(vars(args)):
        if name not in KNOWN_ATTRIBUTES and difflib.get_close_matches(name[: len(PREFIX)], [PREFIX], cutoff=0.85):
            similar = difflib.get_close_matches(name[len(PREFIX) :], known, n=1)
            hint = f"did you mean {PREFIX}{similar[0]}?" if similar else f"known are {', '.join(KNOWN_ATTRIBUTES)}"
            raise ConfigError(f"{name} is not known; {hint}")


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

    ``max_tokens`` None leaves the limit to the buffer. ``more_sampling`` has the further sampling parameters that
    slime's evaluation sends (top_k, stop …), if they are set.
    """

    name: str
    path: str
    samples_per_group: int
    max_tokens: int | None
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
    refuse_unknown_attributes(args)
    attributes = buffer_attributes(args)
    retries = attributes.fetch_trajectory_retry_times
    return RolloutSettings(
        buffer_url=_buffer_url(args),
        token=buffer_token(args),
        job_id=attributes.rollout_buffer_job_id or _derived_job_id(args),
        groups_per_rollout=_at_least_one(args, "rollout_batch_size"),
        samples_per_group=_at_least_one(args, "n_samples_per_prompt"),
        max_failures=None if retries < 0 else retries,
        on_exhausted=attributes.rollout_buffer_on_exhausted,
        wait_s=attributes.rollout_buffer_wait_s,
        lease_s=attributes.rollout_buffer_lease_s,
        timeout_s=attributes.rollout_buffer_timeout_s,
        pause_between_rollouts=bool(getattr(args, "offload_rollout", False)),
        on_policy=_on_policy(args),
    )


def read_image_settings(args: Any) -> ImageSettings | None:
    """Reads the image settings from slime's arguments; None if rows keep placeholders only.

    Raises:
        ConfigError: a value is invalid.
    """
    attributes = buffer_attributes(args)
    if attributes.rollout_buffer_images == "tokens":
        return None
    return ImageSettings(
        cache_bytes=int(1e6 * attributes.rollout_buffer_image_cache_mb),
        fetches_at_once=attributes.rollout_buffer_image_fetches,
        threads=attributes.rollout_buffer_image_threads,
        pixel_dtype=attributes.rollout_buffer_pixel_dtype,
    )


def read_row_settings(args: Any, samples_per_group: int) -> RowSettings:
    """Reads the row settings from slime's arguments.

    Raises:
        ConfigError: a value is invalid.
    """
    attributes = buffer_attributes(args)
    return RowSettings(
        samples_per_group=samples_per_group,
        masks=read_mask_settings(args),
        max_row_tokens=attributes.rollout_buffer_max_row_tokens,
        report_drift=attributes.rollout_buffer_report_drift,
        keep_pictures=attributes.rollout_buffer_keep_images,
        log_probs_wanted_by=log_probs_wanted_by(args),
        turn_discount=read_turn_discount(args),
        max_token_lag=attributes.rollout_buffer_max_token_lag,
        records=wanted_records(args),
        experts_width=_routed_ids_per_token(args),
    )


def wanted_records(args: Any) -> tuple[str, ...]:
    """Returns the kinds of token records that slime's loss and its routing replay need."""
    replays = getattr(args, "use_rollout_routing_replay", False)
    return (*([ROUTED_EXPERTS] if replays else []), *([TOP_P_TOKENS] if needs_top_p_ids(args) else []))


def params_for_records(args: Any) -> dict[str, Any]:
    """Returns the sampling parameters that request the ``wanted_records`` from the engine."""
    params: dict[str, Any] = {}
    if TOP_P_TOKENS in wanted_records(args):
        params["custom_params"] = {"return_top_p_token_ids": True}
    if ROUTED_EXPERTS in wanted_records(args):
        params["return_routed_experts"] = True
    return params


def needs_top_p_ids(args: Any) -> bool:
    """Returns True if slime computes log-probs over the top-p ids: versions of 2026 do, for a top_p below 1."""
    has_field = any(field.name == "rollout_top_p_token_ids" for field in fields(Sample))
    return has_field and getattr(args, "rollout_top_p", 1.0) != 1.0


def _routed_ids_per_token(args: Any) -> int | None:
    layers, chosen = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    return int(layers) * int(chosen) if layers and chosen else None


def read_turn_discount(args: Any) -> float | None:
    """Reads the discount of turns; None if rewards of turns are not trained.

    Raises:
        ConfigError: a value is invalid.
    """
    given = buffer_attributes(args).rollout_buffer_turn_discount
    if given is None and getattr(args, "custom_advantage_function_path", None) == ADVANTAGE_PATH:
        return 1.0
    return given


def read_mask_settings(args: Any) -> MaskSettings:
    """Reads the mask settings from slime's arguments; a type that names a class is a custom mask.

    Raises:
        ConfigError: a value is invalid.
    """
    loss_mask_type = getattr(args, "loss_mask_type", None) or "qwen"
    source = buffer_attributes(args).rollout_buffer_loss_mask or None
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
        ConfigError: a value is invalid.
    """
    attributes = buffer_attributes(args)
    return TrackingSettings(
        use_wandb=bool(getattr(args, "use_wandb", False)),
        json_lines=_path(attributes.rollout_buffer_metrics_file),
        tensorboard=_path(attributes.rollout_buffer_tensorboard_dir),
        example_interval=attributes.rollout_buffer_example_interval,
    )


def _path(given: str | None) -> Path | None:
    return Path(given) if given else None


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
    return buffer_attributes(args).rollout_buffer_token or os.environ.get("ROLLOUT_BUFFER_TOKEN") or None


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
        "num_epoch": buffer_attributes(args).num_epoch,
        "input_file": args.prompt_data,
        "num_repeat_per_sample": str(args.n_samples_per_prompt),  # a text, as slime's own trainer sends it
        "max_tokens": args.rollout_max_response_len,
        "sampling_params": _sampling_params(args),
        "skip_instance_ids": list(skip_instance_ids),
        "job_id": job_id,
        "fresh": fresh,
        "start_id": start_id,
    }
    return {**_limits_of_playing_ahead(args), **_with_options(payload, args)}


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

    A single path there is an evaluation set named ``eval``.

    Raises:
        ConfigError: there are none, or several values are no pairs of name and path.
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
        """Returns the first of these attributes that is set: of the evaluation set, or else of slime's arguments."""
        values = [getattr(dataset, of_set, None), *(getattr(args, attribute, None) for attribute in of_args)]
        return next((entry for entry in values if entry is not None), None)

    return EvalSet(
        name=name,
        path=path,
        samples_per_group=int(value("n_samples_per_eval_prompt", "n_samples_per_eval_prompt") or 1),
        max_tokens=value("max_response_len", "eval_max_response_len", "rollout_max_response_len"),
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


def _engine_and_task(args: Any) -> dict[str, Any]:
    attributes = buffer_attributes(args)
    return {
        "num_process": attributes.rollout_num_process,
        "remote_engine_url": engine_url(args),
        "remote_buffer_url": _buffer_url(args),
        "task_type": args.rollout_task_type,
        "tokenizer_path": args.hf_checkpoint,
        **_set_values(exact_prompts=attributes.rollout_buffer_exact_prompts),
    }


def engine_url(args: Any) -> str | None:
    """Returns the router's URL; slime passes an IPv6 address with or without brackets.

    Raises:
        ConfigError: it has an address and no port.
    """
    address, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if address is None:
        return None
    if port is None:
        raise ConfigError("sglang_router_port is not set, and sglang_router_ip is: set both or none")
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"http://{host}:{port}"


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
    return {**params, **optional, **params_for_records(args)}


def _set_values(**values: Any) -> dict[str, Any]:
    """Returns the values that are set; a ``top_k`` of -1 is none."""
    return {key: value for key, value in values.items() if value is not None and (key, value) != ("top_k", -1)}


def _with_options(payload: dict[str, Any], args: Any) -> dict[str, Any]:
    options = buffer_attributes(args).rollout_buffer_options
    if isinstance(nested := getattr(args, "actor_rollout_ref", None), Mapping):
        options = {"actor_rollout_ref": nested, **options}  # a config in StateLM's layout
    clash = sorted(payload.keys() & options.keys())
    if clash:
        raise ConfigError(f"rollout_buffer_options may not set {', '.join(clash)}: slime's arguments set it")
    return {**payload, **options}


def _limits_of_playing_ahead(args: Any) -> dict[str, int]:
    """Returns the payload's limit of the groups that a job plays ahead of the trainer.

    On-policy, a job plays only the groups of one rollout. Otherwise it begins new groups only while fewer groups are
    ready than one rollout needs. Together with the groups in play, about two rollouts are ahead of a trainer that is
    slower than the devices; for a faster trainer no group waits.
    """
    groups = int(args.rollout_batch_size)
    if _on_policy(args):
        return {"max_groups_ahead": groups}
    if "max_groups_ready" in buffer_attributes(args).rollout_buffer_options:
        return {}
    return {"max_groups_ready": groups}


def _on_policy(args: Any) -> bool:
    attributes = buffer_attributes(args)
    if attributes.rollout_buffer_on_policy and "max_groups_ahead" in attributes.rollout_buffer_options:
        raise ConfigError("rollout_buffer_on_policy plays one rollout ahead: leave max_groups_ahead out of the options")
    return attributes.rollout_buffer_on_policy


def _derived_job_id(args: Any) -> str:
    """Derives an id that is equal after a restart with the same save path and the same work.

    Options that a start may change in a running job do not count.
    """
    attributes = buffer_attributes(args)
    work = {
        "save": getattr(args, "save", None) or getattr(args, "load", None),
        "task_type": args.rollout_task_type,
        "input_file": args.prompt_data,
        "num_epoch": attributes.num_epoch,
        "samples_per_group": args.n_samples_per_prompt,
        "sampling_params": _sampling_params(args),
        "options": {key: value for key, value in attributes.rollout_buffer_options.items() if key not in CHANGEABLE},
    }
    canonical = json.dumps(work, sort_keys=True, default=str)
    return f"{args.rollout_task_type}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"


def _buffer_url(args: Any) -> str:
    given = getattr(args, "agent_rollout_buffer_url", None) or buffer_attributes(args).rollout_buffer_url
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
    """Returns the older flag's last value on the command line of the training; slime's parser ignores this flag."""
    own = subprocess.list2cmdline(sys.argv)
    return next(filter(None, map(_old_flag_in, (own, _drivers_command_line()))), None)


def _old_flag_in(command_line: str) -> str | None:
    urls = re.findall(rf'{OLD_URL_FLAG}(?:=|\s+)"?(?!--)([^\s"]+)', command_line)
    return urls[-1] if urls else None


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


def _at_least_one(args: Any, name: str) -> int:
    value = getattr(args, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be at least 1")
    return value
