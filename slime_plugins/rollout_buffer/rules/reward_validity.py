"""Validates rewards of trajectories, turns and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MAX_REWARD = 3.4028234663852886e38
"""The largest float32, in which trainers compute: with a larger reward, a group's mean or deviation is infinite."""


def as_reward(value: Any) -> float:
    """Returns a reward as a number.

    Raises:
        ValueError: it is a truth value or a text, not finite, or too large for 32 bits. The message continues a
            sentence that begins with the name of the reward ("reward must be …").
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
        ValueError: it is no list, has a number that is no reward, or has not one for each of the ``turns`` that are
            trained. The message continues a sentence, as that of ``as_reward``.
    """
    if value is None:
        return None
    return tuple(_numbers(value, turns, f"the {turns} turns that are trained"))


def as_token_rewards(value: Any, lengths: Sequence[int | None]) -> tuple[tuple[float, ...] | None, ...] | None:
    """Returns the additional rewards of the sampled tokens of each trained turn; None for all or a turn without any.

    ``lengths`` has the sampled tokens of each trained turn, None where they are not known.

    Raises:
        ValueError: as ``as_turn_rewards``, or a turn has not one number for each token.
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


_KINDS = {"bool": "a boolean", "bool_": "a boolean", "str": "a string", "NoneType": "null"}
