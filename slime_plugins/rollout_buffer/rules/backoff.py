"""Exponential backoff: how long to wait before something that failed is tried again. The only one of the project."""

from __future__ import annotations

_MAX_DOUBLINGS = 60
"""Beyond it the wait is capped by every caller anyway, and a float would overflow in the end."""


def backoff_s(failures: int, *, first_s: float, longest_s: float, jitter: float = 1.0) -> float:
    """Returns the seconds to wait after so many failures in a row: ``first_s``, doubled each time, up to ``longest_s``.

    ``jitter`` is a random number from 0 to 1 that spreads those who failed at the same time: the wait is between half
    of that (0) and all of it (1). Without a failure there is no wait.
    """
    if failures < 1:
        return 0.0
    whole = min(longest_s, first_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS))
    return whole * (0.5 + 0.5 * jitter)
