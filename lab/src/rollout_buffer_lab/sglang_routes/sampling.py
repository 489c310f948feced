"""SGLang's ``sampling_params``: its keys, their values, and the error messages that refuse others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

KNOWN_KEYS: Final = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
    "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice",
)  # fmt: skip
DEFAULT_MAX_NEW_TOKENS: Final = 128
GREEDY_BELOW: Final = 1e-6
MAX_IDS: Final = 4096
"""Maximum length of a request's lists of token ids: they are processed for every token of the reply."""
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1000
MAX_BIAS: Final = 1e30
"""Largest bias of a logit: a larger one, divided by a low temperature, would leave the range of a float32."""
WITHOUT_EFFECT: Final[Mapping[str, Any]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "beam_width": 1,
    "watermark": None,
    "choice": None,
}
"""Parameters that no engine here computes, with the value at which they change nothing."""


class BadRequestError(Exception):
    """A request is answered with HTTP 400; ``error`` is the value of ``"error"`` in the body."""

    def __init__(self, error: str | dict[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """One request's parameters. ``not_computed`` are keys of ``WITHOUT_EFFECT`` that the request sets otherwise."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    not_computed: tuple[str, ...] = ()
    asked_ids: tuple[int, ...] = ()
    """Further tokens whose log-probs are requested for each position (``token_ids_logprob``)."""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is chosen."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def cuts(self) -> bool:
        """True if ``top_p``, ``top_k`` or ``min_p`` excludes tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def read_sampling_params(params: Any) -> Sampling:
    """Checks a request's parameters as SGLang does.

    Raises:
        BadRequestError: ``params`` is no object, or has an unknown key or a value of a wrong type or out of range.
    """
    if params is not None and not isinstance(params, dict):
        raise _refused(f"sampling_params must be an object, got {_shown(params)}.")
    params = {key: value for key, value in (params or {}).items() if value is not None or key not in KNOWN_KEYS}
    unknown = next((key for key in params if key not in KNOWN_KEYS), None)
    if unknown is not None:
        expected = ", ".join(f"`{key}`" for key in KNOWN_KEYS)
        raise BadRequestError(f"unknown field `{unknown}`, expected one of {expected}")
    _check_values(params)
    stop = params.get("stop", ())
    return Sampling(
        max_new_tokens=params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=params.get("top_k", -1),
        min_p=float(params.get("min_p", 0.0)),
        logit_bias={int(key): float(value) for key, value in params.get("logit_bias", {}).items()},
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
        ignore_eos=bool(params.get("ignore_eos", False)),
        skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        no_stop_trim=bool(params.get("no_stop_trim", False)),
        sampling_seed=params.get("sampling_seed"),
        not_computed=tuple(key for key, neutral in WITHOUT_EFFECT.items() if params.get(key, neutral) != neutral),
    )


def is_id_list(value: Any) -> bool:
    """Returns True if ``value`` is a list of at most ``MAX_IDS`` token ids."""
    return isinstance(value, list) and len(value) <= MAX_IDS and all(map(_is_id, value))


def _check_values(params: Mapping[str, Any]) -> None:
    for key, (is_right, must_be) in _CHECKS.items():
        if key in params and not is_right(params[key]):
            raise _refused(f"{key} must be {must_be}, got {_shown(params[key])}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_bias(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_IDS:
        return False
    return all(
        isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 and _is_number(bias)
        for key, bias in value.items()
    ) and all(abs(bias) <= MAX_BIAS for bias in value.values())


def _are_stops(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        return False
    return all(isinstance(stop, str) and len(stop) <= MAX_STOP_CHARACTERS for stop in stops)


_CHECKS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "temperature": (lambda value: _is_number(value) and value >= 0, "a non-negative finite number"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "in [0, 1]"),
    "top_k": (lambda value: type(value) is int and (value == -1 or 0 < value < 2**31), "-1 or at least 1"),
    "max_new_tokens": (lambda value: type(value) is int and value >= 0, "at least 0"),
    "n": (lambda value: value == 1 and type(value) is int, "1: one reply is sampled per request"),
    "stop": (
        _are_stops,
        f"a string or a list of strings, at most {MAX_STOPS} of at most {MAX_STOP_CHARACTERS} characters",
    ),
    "stop_token_ids": (is_id_list, f"a list of token ids, at most {MAX_IDS}"),
    "logit_bias": (
        _is_bias,
        f"an object of token ids to numbers between -{MAX_BIAS:g} and {MAX_BIAS:g}, at most {MAX_IDS}",
    ),
    "sampling_seed": (lambda value: type(value) is int and -(2**63) <= value < 2**63, "an integer of 64 bits"),
    "custom_params": (lambda value: isinstance(value, dict), "an object"),
}


def _shown(value: Any) -> str:
    return str(value)[:100]


def _refused(sentence: str) -> BadRequestError:
    return BadRequestError({"message": sentence})
