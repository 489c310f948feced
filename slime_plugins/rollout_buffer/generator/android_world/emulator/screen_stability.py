"""Waits until the screen shows the effect of an action.

A device reacts to a touch late; a sample taken too early shows the old screen, unchanged. So a sample is taken before
the action; after it the code waits for a change or a timeout, and then until the screen stops changing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

_SAMPLED_EVERY = 4  # every 4th pixel of every 4th row is compared
_MAX_CHANGED_SHARE = 0.002  # of these pixels
_COLOR_TOLERANCE = 8  # a smaller difference of a color value is not a change


class Stability(StrEnum):
    """How the wait for a stable screen ended."""

    SETTLED = "settled"  # the screen changed, if a change was awaited, and then stopped changing
    NO_CHANGE = "no_change"  # the screen did not change within the timeout
    TIMED_OUT = "timed_out"  # the screen still changed at the timeout


@dataclass(frozen=True, kw_only=True, slots=True)
class ScreenSample:
    """A sample of the screen: its pixels (height, width, 3), and its elements, compared by equality."""

    pixels: np.ndarray[Any, Any]
    elements: Any

    def same_as(self, other: ScreenSample) -> bool:
        """Returns True if the elements are equal and few pixels differ (a blinking cursor may)."""
        if self.pixels.shape != other.pixels.shape or self.elements != other.elements:
            return False
        mine, theirs = (each.pixels[::_SAMPLED_EVERY, ::_SAMPLED_EVERY].astype(np.int16) for each in (self, other))
        is_changed = (np.abs(mine - theirs) > _COLOR_TOLERANCE).any(axis=-1)
        return float(is_changed.mean()) <= _MAX_CHANGED_SHARE


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityTimeouts:
    """Timeouts in seconds: for the first change, for the end of changes after it, and between two samples."""

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
    """Returns the first sample equal to the one before it, after the screen has changed from ``reference``.

    Without a reference no change is awaited. At a timeout it returns the last sample.
    """
    sampled_at = now()
    newest = sample()
    deadline = sampled_at + times.change_s
    while reference is not None and newest.same_as(reference):
        if sampled_at >= deadline:  # a sample takes time: the last one starts at the deadline or later
            return newest, Stability.NO_CHANGE
        sleep(times.between_s)
        sampled_at = now()
        newest = sample()
    deadline = now() + times.still_s
    while now() < deadline:
        sleep(times.between_s)
        before, newest = newest, sample()
        if newest.same_as(before):
            return newest, Stability.SETTLED
    return newest, Stability.TIMED_OUT
