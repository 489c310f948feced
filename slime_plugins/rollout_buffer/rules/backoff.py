"""Exponential backoff with jitter."""

from __future__ import annotations

_MAX_DOUBLINGS = 60
"""Prevents an overflow of the power; every caller's ``longest_s`` is reached earlier."""


def backoff_s(failures: int, *, first_s: float, longest_s: float, jitter: float = 1.0) -> float:
    """Returns the delay after failures in a row: ``first_s``, doubled each time, up to ``longest_s``; 0 after none.

    ``jitter`` is a random number from 0 to 1 that desynchronizes clients: it scales the delay from half (0) to all of
    it (1).
    """
    if failures < 1:
        return 0.0
    whole = min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
    return whole * (0.5 + 0.5 * jitter)
