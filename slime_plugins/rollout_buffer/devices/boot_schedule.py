"""Computes the start of each boot and the pause after a failed boot. Pure: nothing waits here."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

_MAX_PAUSE_FACTOR = 16


@dataclass(slots=True)
class BootSchedule:
    """The times of boots. ``next_at`` is the time, on the caller's clock, before which no further boot starts."""

    next_at: float

    def take_turn(self, now: float, stagger_s: float) -> float:
        """Returns how many seconds this boot must wait so that boots start ``stagger_s`` apart."""
        begins = max(now, self.next_at)
        self.next_at = begins + stagger_s
        return begins - now


def retry_pause_s(failures: int, settings: DevicePoolSettings) -> float:
    """Returns the pause after ``failures`` consecutive failed boots; it grows after ``boot_attempts`` of them."""
    first_s = settings.boot_pause_s
    failures_beyond = max(failures - settings.boot_attempts, 0)
    return max(first_s, backoff_s(failures_beyond, first_s=2 * first_s, longest_s=_MAX_PAUSE_FACTOR * first_s))
