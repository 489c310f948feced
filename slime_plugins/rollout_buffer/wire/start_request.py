"""The body of ``start_rollout``: the settings of the job (``JobSettings``), its input, and how it starts.

Keys that the job does not know are its generator's options.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final

from pydantic import AfterValidator, PlainValidator, WithJsonSchema, model_validator

from slime_plugins.rollout_buffer.credentials import holds_redacted
from slime_plugins.rollout_buffer.types import CHANGEABLE, MessageMatching
from slime_plugins.rollout_buffer.wire.checks import MAX_KEYS, misspelt_key_messages, nearest_key
from slime_plugins.rollout_buffer.wire.job_settings import EXTERNAL_TASK_TYPE, JobSettings, SamplingPayload
from slime_plugins.rollout_buffer.wire.request_fields import MAX_NESTING, HttpUrl, Identifier, parts_of

MAX_SKIPPED = 5_000_000
"""Limit of the entries of a skip list."""
MAX_INLINE_INSTANCES = 1_000_000
"""Limit of the instances in the body of a start."""
MAX_GROUPS = 2_000_000
"""Limit of the groups of one job: instances times epochs."""
MAX_SETTINGS_ELEMENTS = 10_000
"""Limit of the entries of all lists and objects in the settings and options of a job."""
MAX_SETTINGS_BYTES = 256 * 1024
"""Limit of settings and options as JSON."""
TOO_MANY_BYTES = f"have more than {MAX_SETTINGS_BYTES // 1024} KB"
LISTS = frozenset({"instances", "skip_instance_ids"})
"""Keys that are stored apart from the settings and have their own limits."""
SHORT_NAMES: Final = {
    "engine_url": "remote_engine_url",
    "samples": "num_repeat_per_sample",
    "tokenizer": "tokenizer_path",
}
"""Short names of keys, as on the command line, and slime's names of the same keys."""
ROUTES_OF_A_JOB = (
    *("cancel", "pause", "resume", "drain", "deliveries", "explanation", "groups", "series"),
    *("attempts", "mismatch", "trainer_rows", "buffer/write"),
)
"""Routes that follow the id of a job in a path: no id may end in one of them."""

ENGINES_OWN = (
    "custom_params", "ebnf", "frequency_penalty", "ignore_eos", "json_schema", "logit_bias", "min_new_tokens", "min_p",
    "n", "no_stop_trim", "presence_penalty", "regex", "repetition_penalty", "return_routed_experts", "sampling_seed",
    "seed", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_regex", "stop_token_ids",
    "structural_tag", "top_k",
)  # fmt: skip
"""Sampling parameters of the engine that slime lacks; a key that resembles one of them is refused as misspelt."""
SAMPLING_ALONE = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "repetition_penalty")
"""Keys that can only be sampling parameters: outside of ``sampling_params`` they are refused."""
GATEWAYS_OWN = ("pin_sampling_params", "message_matching")
"""Options of the gateway that are known keys here, so that they are not taken for a misspelt field."""


def _nameable(value: str) -> str:
    """Refuses ids that are ambiguous in URLs, because clients resolve dots in paths, and routes follow the id."""
    segments = value.split("/")
    if "." in segments or ".." in segments:
        raise ValueError("must not have . or .. between slashes: no URL can name it")
    if route := next((route for route in ROUTES_OF_A_JOB if value.endswith(f"/{route}")), None):
        raise ValueError(f"must not end in /{route}: that is a route")
    return value


JobName = Annotated[Identifier, AfterValidator(_nameable)]


def _checked_lines(value: Any) -> list[dict[str, Any]]:
    """Checks line by line, so that other threads run in between; pydantic would hold the GIL for all lines."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INLINE_INSTANCES:
        raise ValueError(f"must be a list of 1 to {MAX_INLINE_INSTANCES} objects")
    for index, line in enumerate(value):
        if not isinstance(line, dict):
            raise ValueError(f"entry {index} must be an object")
    return value


def _checked_skip_list(value: Any) -> list[str | int]:
    if not isinstance(value, list) or len(value) > MAX_SKIPPED:
        raise ValueError(f"must be a list of up to {MAX_SKIPPED} ids")
    for index, entry in enumerate(value):
        if not isinstance(entry, str) and type(entry) is not int:
            raise ValueError(f"entry {index} must be a string or an integer")
    return value


_LINES_SCHEMA: Final = WithJsonSchema(
    {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_INLINE_INSTANCES}
)
_SKIPPED_SCHEMA: Final = WithJsonSchema(
    {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "maxItems": MAX_SKIPPED}
)


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


class StartPayload(JobSettings):
    """The body of ``start_rollout``: the settings of the job, its input, and how it starts."""

    instances: Annotated[list[dict[str, Any]], PlainValidator(_checked_lines), _LINES_SCHEMA] | None = None
    """The input's lines, if the buffer host cannot read the trainer's file."""
    remote_engine_url: HttpUrl | None = None
    """Address of the trainer's SGLang router; not needed for `external`. Short name: `engine_url`."""
    remote_buffer_url: HttpUrl | None = None
    """Ignored: the address to which slime's generators write."""
    skip_instance_ids: Annotated[list[str | int], PlainValidator(_checked_skip_list), _SKIPPED_SCHEMA] | None = None
    """Ids of consumed instances: each entry skips one epoch of its instance, from the first."""
    job_id: JobName | None = None
    """Id of the job. Default: that of an open or failed job of this payload, else new."""
    fresh: bool = False
    """Starts a new job; a job of this id is cancelled and renamed, unless a trainer takes it over from its writers."""
    start_id: Identifier | None = None
    """Id of this start; a repetition changes nothing, even with ``fresh``."""
    retry_given_up: bool = False
    """Opens the given-up slots of an evaluation for ``max_attempts`` more attempts."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_misspelt_key(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        sampling = body.get("sampling_params")
        known = [*cls.model_fields, *SHORT_NAMES, *GATEWAYS_OWN]
        wrong = misspelt_key_messages(body, known) + _misplaced(islice(body, MAX_KEYS), known)
        if isinstance(sampling, dict):
            wrong += misspelt_key_messages(sampling, [*SamplingPayload.model_fields, *ENGINES_OWN], "sampling_params.")
        if wrong:
            raise ValueError("; ".join(wrong))
        return body

    @model_validator(mode="before")
    @classmethod
    def _may_use_short_names(cls, body: Any) -> Any:
        """Replaces short names; runs before the check for misspelt keys."""
        if not isinstance(body, dict):
            return body
        both = [short for short in SHORT_NAMES if short in body and SHORT_NAMES[short] in body]
        if both:
            raise ValueError(f"{both[0]} and {SHORT_NAMES[both[0]]} are the same: give one of them")
        return {SHORT_NAMES.get(key, key): value for key, value in body.items()}

    @model_validator(mode="before")
    @classmethod
    def _can_be_kept_and_shown(cls, body: Any) -> Any:
        """Runs first: pydantic calls ``before`` validators in reverse order of definition."""
        shown = {key: value for key, value in body.items() if key not in LISTS} if isinstance(body, dict) else {}
        if reason := why_too_large(shown):
            raise ValueError(f"settings and options {reason}; what is larger belongs into a file that they name")
        if holds_redacted(shown):
            raise ValueError("it has *** in place of a password, a key or a header: send the real one")
        return body

    @model_validator(mode="after")
    def _brings_its_input_in_one_way(self) -> StartPayload:
        if self.input_file is not None and self.instances is not None:
            raise ValueError("give input_file or instances, not both")
        return self

    @model_validator(mode="after")
    def _retries_what_was_given_up_in_evaluations_alone(self) -> StartPayload:
        if self.retry_given_up and not self.evaluation:
            raise ValueError("retry_given_up is for jobs with evaluation: true: a trainer has the group already")
        return self

    @model_validator(mode="after")
    def _asks_an_openai_engine_for_evaluations_by_a_models_name(self) -> StartPayload:
        if self.engine_api == "openai" and (not self.evaluation or self.task_type == EXTERNAL_TASK_TYPE):
            raise ValueError("engine_api openai gives no token ids to train on: it is for jobs with evaluation: true")
        if self.engine_api == "openai" and self.engine_model is None:
            raise ValueError("engine_model is missing: an engine of the kind openai is asked for a model by name")
        return self

    @model_validator(mode="after")
    def _names_a_known_rule_of_matching(self) -> StartPayload:
        if (self.model_extra or {}).get("message_matching", MessageMatching.STRICT) not in list(MessageMatching):
            raise ValueError(f"message_matching must be one of {', '.join(MessageMatching)}")
        return self

    @model_validator(mode="after")
    def _has_an_input_and_an_engine_for_its_runner(self) -> StartPayload:
        if self.task_type == EXTERNAL_TASK_TYPE:
            return self
        if not self.has_input:
            raise ValueError("input_file is missing: a path under the server's data roots (or send instances)")
        if self.remote_engine_url is None:
            raise ValueError("engine_url (remote_engine_url) is missing: the address of the SGLang router that samples")
        if self.exact_prompts == "require" and (self.engine_api != "sglang" or self.tokenizer_path is None):
            raise ValueError("exact_prompts: require needs engine_api sglang and a tokenizer_path, to compare prompts")
        return self

    def settings(self) -> dict[str, Any]:
        """Returns the settings as JSON, without the options."""
        return self.model_dump(mode="json", include=set(JobSettings.model_fields))

    def named_settings(self) -> dict[str, Any]:
        """Returns the settings that the payload contains, without defaults."""
        names = set(JobSettings.model_fields)
        return self.model_dump(mode="json", include=names, exclude_unset=True, exclude_none=True)

    @property
    def has_input(self) -> bool:
        """True if the payload has an input."""
        return self.input_file is not None or self.instances is not None

    @property
    def is_trainers(self) -> bool:
        """True if a trainer starts the job: its payload has a skip list, possibly empty."""
        return self.skip_instance_ids is not None

    @functools.cached_property
    def identity(self) -> str:
        """The digest of the payload: payloads with the same digest are the same job.

        Canonical JSON is hashed instance by instance, so that other threads run in between.
        """
        content = {**self.settings(), **self.options, "instances": self.instances}
        content = {key: value for key, value in content.items() if key not in CHANGEABLE}
        content["group_timeout_seconds"] = 300.0  # a constant, as in the digests of older jobs
        digest = hashlib.sha256()
        for key_index, (key, value) in enumerate(sorted(content.items())):
            digest.update(b"," if key_index else b"{")
            digest.update(_canonical(key) + b":")
            if key == "instances" and self.instances:
                for line_index, line in enumerate(self.instances):
                    digest.update((b"," if line_index else b"[") + _canonical(line))
                digest.update(b"]")
            else:
                digest.update(_canonical(value))
        digest.update(b"}")
        return digest.hexdigest()


def why_too_large(settings: Mapping[str, Any]) -> str | None:
    """Returns why settings and options are too large to be stored, or None; stops at the first exceeded limit."""
    level: list[Any] = [settings]
    elements = characters = 0
    for _ in range(MAX_NESTING + 1):
        containers = [outer for outer in level if isinstance(outer, dict | list)]
        elements += sum(map(len, containers))
        if elements > MAX_SETTINGS_ELEMENTS:
            return f"have more than {MAX_SETTINGS_ELEMENTS} elements"
        names = [key for outer in containers if isinstance(outer, dict) for key in outer]
        characters += sum(len(text) for text in (*level, *names) if isinstance(text, str))
        if characters > MAX_SETTINGS_BYTES:
            return TOO_MANY_BYTES
        level = [inner for outer in containers for inner in parts_of(outer)]
        if not level:
            size = len(json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass"))
            return TOO_MANY_BYTES if size > MAX_SETTINGS_BYTES else None
    return f"are nested more than {MAX_NESTING} levels deep"


def _misplaced(given: Iterable[str], known: Sequence[str]) -> list[str]:
    """Returns a correction for each sampling parameter outside of ``sampling_params``, where it has no effect."""
    corrections = []
    for key in given:
        near = nearest_key(str(key), [*known, *SAMPLING_ALONE])
        if near in SAMPLING_ALONE:
            corrections.append(f"{key} is not known here; did you mean sampling_params.{near}?")
    return corrections
