"""A clock that tests set: nothing waits, and results do not depend on the load of the machine."""

from __future__ import annotations


class SettableClock:
    """A clock that moves only when a test moves it. It returns seconds, as ``time.time`` does."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
