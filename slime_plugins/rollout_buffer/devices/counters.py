"""Counters of one device over all its workers, past ones included. Memory is bounded."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport

_KEPT_DURATIONS = 1000
_KEPT_LEASES = 100


class DeviceCounters:
    """Counts leases and failures, and stores recent durations.

    ``replacements`` are workers that were replaced after a failure, ``recyclings`` those replaced because of their age.
    """

    def __init__(self) -> None:
        self._episodes = 0
        self._steps = 0
        self.replacements = 0
        self.recyclings = 0
        self.quarantines = 0
        self._held_s = 0.0
        self.failures: Counter[str] = Counter()
        """Failures by kind; some have no lease report: a failed boot, an expired lease."""
        self._reset_s: deque[float] = deque(maxlen=_KEPT_DURATIONS)
        self._step_s: deque[float] = deque(maxlen=_KEPT_DURATIONS)
        self._recent_leases: deque[tuple[int, float]] = deque(maxlen=_KEPT_LEASES)
        """Number of steps and seconds of each lease."""

    def add(self, report: LeaseReport) -> None:
        """Counts one lease, unless the lease made no call to the device."""
        if not report.called:
            return
        self._episodes += 1
        self._steps += len(report.step_s)
        self._held_s += report.held_s
        self.failures.update(report.failures)
        self._reset_s.extend(report.reset_s)
        self._step_s.extend(report.step_s)
        self._recent_leases.append((len(report.step_s), report.held_s))

    def as_dict(self) -> dict[str, Any]:
        """Returns the counters for JSON.

        Durations cover the last thousand calls. Actions per minute cover the last hundred leases, from lease to return.
        A value that covers nothing yet is None.
        """
        return {
            "episodes": self._episodes,
            "steps": self._steps,
            "replacements": self.replacements,
            "recyclings": self.recyclings,
            "quarantines": self.quarantines,
            "failures": dict(self.failures),
            "held_s": round(self._held_s, 3),
            "reset_s_p50": _quantile(self._reset_s, 0.5),
            "reset_s_p95": _quantile(self._reset_s, 0.95),
            "step_s_p50": _quantile(self._step_s, 0.5),
            "step_s_p95": _quantile(self._step_s, 0.95),
            "actions_per_minute": _per_minute(self._recent_leases),
        }


def _per_minute(recent_leases: Iterable[tuple[int, float]]) -> float | None:
    leases = list(recent_leases)
    seconds = sum(held_s for _, held_s in leases)
    return round(60 * sum(steps for steps, _ in leases) / seconds, 3) if seconds > 0 else None


def _quantile(values: deque[float], share: float) -> float | None:
    """Returns the smallest value that at least ``share`` of the values do not exceed."""
    if not values:
        return None
    rank = math.ceil(share * len(values))  # from 1 on
    return round(sorted(values)[rank - 1], 4)
