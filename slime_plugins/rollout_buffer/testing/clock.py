"""A clock for tests of whatever takes one: nothing waits, and nothing depends on how busy the machine is."""

from __future__ import annotations


class SettableClock:
    """A clock that stands still until a test moves it. Seconds, as ``time.time``."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Returns the time that the test set."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves on by that much."""
        self.now += seconds
