"""Pure: which numbers are valid rewards, token ids and log-probs.

They arrive from engines and over HTTP, and are trained without further checks: an id without an embedding crashes the
trainer, an invalid log-prob or reward corrupts its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

MAX_REWARD: Final = 3.4028234663852886e38
"""The largest float32, in which trainers compute: with a larger reward, a group's mean or deviation is infinite."""
MAX_VOCABULARY: Final = 2**24
"""The limit if the model's vocabulary is unknown: sixty times the largest vocabulary in use."""
ROUNDING: Final = 1e-3
"""A log-prob computed in half precision may exceed 0 by this much."""
LOWEST_LOG_PROB: Final = -3.0e38
"""Slightly above the lowest float32 (-3.4e38), below which a number is infinite for trainers."""


def as_reward(value: Any) -> float:
    """Returns a reward as a number.

    Raises:
        ValueError: the value is no number, is not finite, or is too large for 32 bits. The message continues a sentence
            that begins with the name of the reward ("reward must be …").
    """
    kind = type(value).__name__
    if isinstance(value, str | bytes) or kind in ("bool", "bool_") or not hasattr(value, "__float__"):
        raise ValueError(f"must be a number, not {_KINDS.get(kind, kind)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise ValueError(f"must be a number, not {kind}") from error
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"must be a finite number of 32 bits (up to 3.4e38), and {number:g} is larger")
    return number


def as_turn_rewards(value: Any, turns: int) -> tuple[float, ...] | None:
    """Returns the rewards of the trained turns, None if there are none.

    Raises:
        ValueError: the value is no list, has an entry that is no reward, or has not one entry for each of the ``turns``
            that are trained. The message continues a sentence, as the message of ``as_reward`` does.
    """
    if value is None:
        return None
    return tuple(_numbers(value, turns, f"the {turns} turns that are trained"))


def as_token_rewards(value: Any, lengths: Sequence[int | None]) -> tuple[tuple[float, ...] | None, ...] | None:
    """Returns the additional rewards of the sampled tokens of each trained turn; None for a turn without any, and
    None as the whole result if ``value`` is None.

    ``lengths`` has the number of sampled tokens of each trained turn, None where it is not known.

    Raises:
        ValueError: as ``as_turn_rewards``; or the rewards of a turn are not one number for each token.
    """
    if value is None:
        return None
    _check_count(value, len(lengths), f"the {len(lengths)} turns that are trained")
    found = enumerate(zip(value, lengths, strict=True))
    return tuple(None if own is None else tuple(_of_tokens(turn, own, length)) for turn, (own, length) in found)


def _of_tokens(turn: int, value: Any, length: int | None) -> list[float]:
    if length is None:
        raise ValueError(f"names rewards of single tokens in turn {turn}, whose tokens are not known: send generations")
    try:
        return _numbers(value, length, f"the {length} sampled tokens of turn {turn}")
    except ValueError as error:
        raise ValueError(f"of turn {turn} {error}") from error


def _numbers(value: Any, count: int, of_what: str) -> list[float]:
    _check_count(value, count, of_what)
    return [as_reward(number) for number in value]


def _check_count(value: Any, count: int, of_what: str) -> None:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, not {_KINDS.get(type(value).__name__, type(value).__name__)}")
    if len(value) != count:
        raise ValueError(f"has {len(value)} entries for {of_what}: one for each is required")


def checked_log_prob(value: object) -> float | None:
    """Returns a log-prob, with a rounding error above 0 clipped; None if it is no number, not finite, or above 0."""
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # one of the two types that were asked for
    except OverflowError:
        return None
    if math.isnan(number) or not LOWEST_LOG_PROB <= number <= ROUNDING:
        return None
    return min(number, 0.0)


def first_invalid_id(ids: Iterable[int], size: int | None) -> int | None:
    """Returns the first id outside of a vocabulary of ``size``; None if all are inside."""
    bound = MAX_VOCABULARY if size is None else size
    return next((token for token in ids if not 0 <= token < bound), None)


_KINDS = {"bool": "a boolean", "bool_": "a boolean", "str": "a string", "NoneType": "null"}
