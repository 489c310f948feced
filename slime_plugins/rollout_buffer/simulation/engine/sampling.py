"""SGLang's ``sampling_params``: which keys there are, which values it takes, and the sentences it refuses others with.

Used here: max_new_tokens, temperature, stop, stop_token_ids, ignore_eos, skip_special_tokens, no_stop_trim,
sampling_seed. The rest is checked and then has no effect, because nothing is sampled here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["KNOWN_KEYS", "BadRequestError", "Sampling", "read_sampling_params"]

KNOWN_KEYS: Final = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
DEFAULT_MAX_NEW_TOKENS: Final = 128


class BadRequestError(Exception):
    """An HTTP 400; ``error`` is what stands under ``"error"`` in its body: a sentence, or an object with one."""

    def __init__(self, error: str | dict[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The parameters that have an effect here."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


def read_sampling_params(params: Mapping[str, Any] | None) -> Sampling:
    """Checks a request's parameters as SGLang does.

    Raises:
        BadRequestError: an unknown key, or a value out of range.
    """
    params = {key: value for key, value in (params or {}).items() if value is not None or key not in KNOWN_KEYS}
    unknown = next((key for key in params if key not in KNOWN_KEYS), None)
    if unknown is not None:
        expected = ", ".join(f"`{key}`" for key in KNOWN_KEYS)
        raise BadRequestError(f"unknown field `{unknown}`, expected one of {expected}")
    _check_ranges(params)
    stop = params.get("stop", ())
    return Sampling(
        max_new_tokens=params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
        temperature=float(params.get("temperature", 1.0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(params.get("stop_token_ids", ())),
        ignore_eos=bool(params.get("ignore_eos", False)),
        skip_special_tokens=bool(params.get("skip_special_tokens", True)),
        no_stop_trim=bool(params.get("no_stop_trim", False)),
        sampling_seed=params.get("sampling_seed"),
    )


def _check_ranges(params: Mapping[str, Any]) -> None:
    temperature, top_p = params.get("temperature", 1.0), params.get("top_p", 1.0)
    most, count = params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS), params.get("n", 1)
    if not _is_number(temperature) or not math.isfinite(temperature) or temperature < 0:
        raise _refused(f"temperature must be a non-negative finite number, got {temperature}.")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise _refused(f"top_p must be in (0, 1], got {top_p}.")
    if type(most) is not int or most < 0:
        raise _refused(f"max_new_tokens must be at least 0, got {most}.")
    if count != 1:
        raise _refused(f"the stand-in engine samples one reply per request: n must be 1, got {count}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(sentence: str) -> BadRequestError:
    return BadRequestError({"message": sentence})
