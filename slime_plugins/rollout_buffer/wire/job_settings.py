"""The settings of a job (input, sampling, rules for groups, limits) with their meanings, defaults and bounds.

Defaults that rules for stored jobs need as well are in ``rules/stored_settings.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from slime_plugins.rollout_buffer.extensions import Group, installed, missing
from slime_plugins.rollout_buffer.rules.stored_settings import DEFAULTS
from slime_plugins.rollout_buffer.types import DEFAULT_TEMPERATURE, SamplingParams
from slime_plugins.rollout_buffer.wire.request_fields import MAX_COUNT, Count, Number, Ratio

EXTERNAL_TASK_TYPE = "external"
"""Task type of jobs without a generator: programs write their items over HTTP."""
MAX_ATTEMPTS = 100
"""Limit of the attempts at one slot, including retries of a slot that was given up."""
AUTO: Final = "auto"
"""Value of ``num_process`` that lets the runner adapt the number of concurrent episodes."""
FIXED_NUM_PROCESS: Final = 100
"""Default of ``num_process``."""
MAX_GROUP_SIZE: Final = 4096
"""Limit of ``num_repeat_per_sample``."""
DEFAULT_MAX_NEW_TOKENS: Final = 4096

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]


def _in_order(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("the lower end comes first")
    return value


def _known_engine_api(name: str) -> str:
    if name not in ("sglang", "openai") and name not in installed(Group.ENGINES):
        raise ValueError(f"must be sglang, openai, or an engine of a package: {missing(Group.ENGINES, name)}")
    return name


class SamplingPayload(BaseModel):
    """``sampling_params`` as slime sends them; keys that are not listed go to the engine as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    max_tokens: Annotated[Count, Field(ge=1, le=10_000_000)] | None = None
    """Cap of one generation, in tokens, by the name slime uses."""
    max_new_tokens: Annotated[Count, Field(ge=1, le=10_000_000)] | None = None
    """The same by the name SGLang uses; it takes precedence over `max_tokens`."""
    temperature: Annotated[Number, Field(ge=0, le=100)] = DEFAULT_TEMPERATURE
    """Sampling temperature."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the probability mass that is sampled from."""


class JobSettings(BaseModel):
    """The settings of a job, which are stored with it: input, sampling, rules for groups, limits."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    task_type: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """The generator of the job; the items of `external` jobs come only through `/buffer/write`."""
    input_file: Path | None = None
    """JSONL or Parquet file under the server's data roots, one instance per line; `path@[a:b]` is a slice."""
    num_process: Annotated[Count, Field(ge=1, le=100_000)] | Literal["auto"] = FIXED_NUM_PROCESS
    """Number of concurrent episodes; `auto` adapts it to engine, devices and trainer, within the next two limits."""
    num_process_min: Annotated[Count, Field(ge=1, le=100_000)] | None = None
    """Lower limit of `num_process: auto`. None: n, the size of a group."""
    num_process_max: Annotated[Count, Field(ge=1, le=100_000)] = 1024
    """Upper limit of `num_process: auto`."""
    num_epoch: Annotated[Count, Field(ge=1, le=1_000_000)] = 1
    """Number of epochs of the input."""
    num_repeat_per_sample: Annotated[Count, Field(ge=1, le=MAX_GROUP_SIZE)] = 1
    """n, the number of slots of each group. Short name: `samples`."""
    tokenizer_path: Path | None = DEFAULTS.tokenizer_path
    """Folder of the trainer's tokenizer on the buffer host. Short name: `tokenizer`."""
    max_tokens: Annotated[Count, Field(ge=1, le=10_000_000)] | None = None
    """Maximum tokens of one generation if `sampling_params` sets none. Default of both: 4096."""
    sampling_params: SamplingPayload = SamplingPayload()
    """Sampling parameters for the engine."""
    evaluation: bool = DEFAULTS.evaluation
    """True for a job whose results are not trained: groups with equal rewards are not filtered."""
    engine_api: Annotated[str, AfterValidator(_known_engine_api)] = "sglang"
    """Protocol of the engine: SGLang's `/generate`, or for evaluations `/chat/completions` (`openai`)."""
    engine_model: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Name of the model; required with `engine_api: openai`."""
    exact_prompts: Literal["report", "require"] = "report"
    """`require` fails a job whose engine changes prompts or does not report what it ran ([fidelity](fidelity.md))."""
    sampling_seed: Annotated[Count, Field(ge=0)] | None = None
    """Seed of the job, from which each slot gets its own seed; effective if the engine supports seeds."""

    min_valid_group_size_ratio: Ratio = DEFAULTS.min_valid_group_size_ratio
    """Minimum that a generator's own `is_valid_group` gets, as a fraction of n; only full groups are judged by it."""
    min_valid_item_size_ratio: Ratio = DEFAULTS.min_valid_item_size_ratio
    """Fraction of n that must remain after `filter_item`; otherwise the group is filtered."""
    min_timeout_group_size_ratio: Ratio = DEFAULTS.min_timeout_group_size_ratio
    """A short group is padded and delivered from this fraction of n on, and fails below it."""
    group_timeout_seconds: Annotated[Number, Field(gt=0)] | None = DEFAULTS.group_timeout_seconds
    """A begun group closes after this time without an item or open session. None: 300; for played jobs unlimited."""
    reward_range: Annotated[tuple[Number, Number], AfterValidator(_in_order)] | None = DEFAULTS.reward_range
    """Items with a reward outside of it are refused (422). None: the generator's own range, if it has one."""
    normalize_rewards: bool = DEFAULTS.normalize_rewards
    """Z-scores the rewards of each group; the trainer then needs ``--disable-rewards-normalization``."""
    padding: Literal["dummy", "copy"] = DEFAULTS.padding
    """How short groups are filled up to n: ``remove_sample`` dummies, or slime's copies with halved rewards."""
    max_attempts: Annotated[Count, Field(ge=1, le=MAX_ATTEMPTS)] = DEFAULTS.max_attempts
    """Number of failed attempts after which a slot is given up."""
    attempt_timeout_seconds: Annotated[Number, Field(gt=0)] | None = 3600.0
    """An attempt that plays longer fails; the wait for a device does not count. None is unlimited."""
    stop_hopeless_groups: bool = False
    """Ends the running attempts of a group that must fail because too many of its slots were given up."""
    stop_after_failures: Annotated[Count, Field(ge=0, le=MAX_COUNT)] = 16
    """A job fails after this many failures in a row, of two or more instances, with one error code. 0: never."""
    max_groups_ahead: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = DEFAULTS.max_groups_ahead
    """New groups wait while this many are played, ready or leased. None is unlimited."""
    max_groups_ready: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = DEFAULTS.max_groups_ready
    """New groups wait while this many are ready. None is unlimited; slime's trainer sets the groups of one rollout."""
    max_weight_version_lag: Annotated[Count, Field(ge=0)] | None = DEFAULTS.max_weight_version_lag
    """A group is stale if a member was sampled by weights more than this many versions behind. None is unlimited."""
    staleness_policy: Literal["admit", "drop", "flag"] | None = DEFAULTS.staleness_policy
    """`admit` delays groups, `drop` filters, `flag` marks stale ones. Default: `admit` for played jobs, else `drop`."""
    pause_when_idle_s: Annotated[Number, Field(gt=0)] | None = DEFAULTS.pause_when_idle_s
    """A job with undelivered groups is paused after this time without a poll; the next poll resumes it. None: never."""

    @model_validator(mode="after")
    def _has_ordered_concurrency_limits(self) -> Self:
        if (self.num_process_min or 1) > self.num_process_max:
            raise ValueError("num_process_min: it is larger than num_process_max")
        return self

    def fixed_num_process(self) -> int:
        """Returns ``num_process`` as a number; for ``auto`` this is the default."""
        return FIXED_NUM_PROCESS if self.num_process == AUTO else int(self.num_process)

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are no settings: they are for the generator."""
        return dict(self.model_extra or {})

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters for the engine.

        The cap of tokens is the first that is set: ``max_new_tokens`` or ``max_tokens`` of ``sampling_params``, then
        ``max_tokens`` of the job.
        """
        params = self.sampling_params
        cap = params.max_new_tokens or params.max_tokens or self.max_tokens or DEFAULT_MAX_NEW_TOKENS
        return SamplingParams(
            max_new_tokens=cap, temperature=params.temperature, top_p=params.top_p, extra=dict(params.model_extra or {})
        )

    def plain_sampling_params(self) -> dict[str, Any]:
        """Returns the sampling parameters in slime's form, always with ``max_tokens``."""
        sent = self.sampling_params.model_dump(mode="json", exclude_none=True, exclude={"max_new_tokens"})
        return {**sent, "max_tokens": self.sampling().max_new_tokens}
