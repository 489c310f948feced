"""Which numbers are rewards."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["LARGEST_REWARD", "as_reward"]

LARGEST_REWARD = 3.4028234663852886e38
"""The largest number of 32 bits, as trainers compute with: beyond it, a group's mean or spread is infinite."""


def as_reward(value: Any) -> float:
    """Returns a reward as a number.

    Raises:
        ValueError: it is none: a truth value, text, not finite, or too large for 32 bits. The sentence goes on after
            what is named as the reward ("reward must be …").
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
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"must be a finite number of 32 bits (up to 3.4e38), and {number:g} is larger")
    return number


_KINDS = {"bool": "a boolean", "bool_": "a boolean", "str": "a string", "NoneType": "null"}
