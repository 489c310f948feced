"""The device's clock, which starts at a fixed time and advances only with actions on the device."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

START_TIME = datetime(2023, 10, 15, 15, 34, 23, tzinfo=UTC)


class DeviceClock:
    """Wall clock and uptime of one device. Neither looks at the host's clock, so every run sees the same times."""

    def __init__(self) -> None:
        self.now = START_TIME
        self.uptime_s = 0.0

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.uptime_s += seconds
        self.now += timedelta(seconds=seconds)

    @property
    def now_ms(self) -> int:
        """Milliseconds since 1970, as Android's databases keep times."""
        return int(self.now.timestamp() * 1000)
