"""When is the screen after an action the screen that the action led to?

A device answers a touch late. Whoever asks too early sees the old screen, standing still. So: look right before the
action, wait until something differs from that or enough time has passed, and only then wait until it is still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

_SAMPLED_EVERY = 4
_MOVED_SHARE = 0.002
_PIXEL_TOLERANCE = 8


class Stability(StrEnum):
    """How the wait for a settled screen ended."""

    STABLE = "settled"  # something changed, and then nothing more
    NO_CHANGE = "no_change"  # nothing changed in the time it was given
    TIMED_OUT = "timed_out"  # it still moved when the time was over


@dataclass(frozen=True, kw_only=True, slots=True)
class ScreenSample:
    """One look at the device: its pixels (height, width, 3), and its elements, compared by equality."""

    pixels: np.ndarray[Any, Any]
    elements: Any

    def same_as(self, other: ScreenSample) -> bool:
        """True when the elements are equal and hardly any pixel differs (a blinking cursor may)."""
        if self.pixels.shape != other.pixels.shape or self.elements != other.elements:
            return False
        mine, theirs = (one.pixels[::_SAMPLED_EVERY, ::_SAMPLED_EVERY].astype(np.int16) for one in (self, other))
        moved = (np.abs(mine - theirs) > _PIXEL_TOLERANCE).any(axis=-1)
        return float(moved.mean()) <= _MOVED_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityTimeouts:
    """Timeouts in seconds: for the first change, for standing still after it, and between two looks."""

    change_s: float = 2.0
    still_s: float = 6.0
    between_s: float = 0.3


def wait_until_stable(
    reference: ScreenSample | None,
    sample: Callable[[], ScreenSample],
    times: StabilityTimeouts,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[ScreenSample, Stability]:
    """Returns the first look that follows an equal one, after the screen left ``reference`` (None: at once)."""
    begun = now()
    seen = sample()
    deadline = begun + times.change_s
    while reference is not None and seen.same_as(reference):
        if begun >= deadline:  # a look takes its time: the last one has to begin when the patience is at its end
            return seen, Stability.NO_CHANGE
        sleep(times.between_s)
        begun = now()
        seen = sample()
    deadline = now() + times.still_s
    while now() < deadline:
        sleep(times.between_s)
        before, seen = seen, sample()
        if seen.same_as(before):
            return seen, Stability.STABLE
    return seen, Stability.TIMED_OUT
