"""When devices boot: staggered, and after a failed boot again once a pause is over. Pure: nothing waits here."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

_MAX_PAUSE = 16


@dataclass(slots=True)
class BootSchedule:
    """Whose turn it is to boot. ``next_at``: the moment, on its owner's clock, before which no further boot begins."""

    next_at: float

    def take_turn(self, now: float, stagger_s: float) -> float:
        """Returns how many seconds this boot waits, so that boots begin ``stagger_s`` apart."""
        begins = max(now, self.next_at)
        self.next_at = begins + stagger_s
        return begins - now


def retry_pause_s(failures: int, settings: DevicePoolSettings) -> float:
    """Returns how long a device waits after so many failed boots in a row: longer once its attempts are used up."""
    first_s = settings.boot_pause_s
    beyond = max(failures - settings.boot_attempts, 0)
    return max(first_s, backoff_s(beyond, first_s=2 * first_s, longest_s=_MAX_PAUSE * first_s))
