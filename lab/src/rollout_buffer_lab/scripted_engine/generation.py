"""The timing of one reply: its tokens appear over time, and it may be aborted, frozen, or get new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds before the first token, and before each further token."""

    latency_s: float = 0.0
    token_latency_s: float = 0.0


class Generation:
    """Counts the tokens of one reply by the clock, from ``begin`` to its last token or ``abort``."""

    def __init__(self, pace: Pace, weight_version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = pace
        self._clock = clock
        self._length: int | None = None
        self._started_at = 0.0
        self._frozen_at: float | None = None
        self._aborted_after: int | None = None
        self._versions: list[tuple[str, int]] = [(weight_version, 0)]
        self._changed = asyncio.Event()

    @property
    def aborted(self) -> bool:
        """True if ``abort`` ended it."""
        return self._aborted_after is not None

    @property
    def produced(self) -> int:
        """The number of tokens so far."""
        if self._aborted_after is not None:
            return self._aborted_after
        if self._length is None:
            return 0
        now = self._clock() if self._frozen_at is None else self._frozen_at
        return min(self._length, self._count_after(now - self._started_at))

    @property
    def finished(self) -> bool:
        """True if no token will follow."""
        return self.aborted or (self._length is not None and self.produced >= self._length)

    def begin(self, length: int) -> None:
        """Starts the clock of a reply of ``length`` tokens."""
        self._length = length
        self._started_at = self._clock()
        if self._frozen_at is not None:
            self._frozen_at = self._started_at

    def abort(self) -> None:
        """Finishes the reply with the tokens so far; a finished reply does not change."""
        if not self.finished:
            self._aborted_after = self.produced
        self.wake()

    def freeze(self) -> None:
        """Stops the clock: no token appears until ``thaw``."""
        if self._frozen_at is None:
            self._frozen_at = self._clock()
        self.wake()

    def thaw(self) -> None:
        """Continues the clock."""
        if self._frozen_at is not None:
            self._started_at += self._clock() - self._frozen_at
            self._frozen_at = None
        self.wake()

    def set_weight_version(self, version: str) -> None:
        """Sets the version of later tokens."""
        self._versions.append((version, self.produced))

    def version_spans(self, count: int) -> list[tuple[str, int, int]]:
        """Returns version, start and end of each span of the first ``count`` tokens; without tokens one empty span."""
        ends = [start for _, start in self._versions[1:]] + [count]
        spans = [(version, start, min(end, count)) for (version, start), end in zip(self._versions, ends, strict=True)]
        return [span for span in spans if span[2] > span[1]] or [(self._versions[-1][0], 0, 0)]

    def wake(self) -> None:
        """Wakes all waiters."""
        self._changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until ``condition`` holds; it is evaluated at each change of this reply."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_tokens(self, count: int) -> None:
        """Waits until there are ``count`` tokens, or ``abort`` ends the reply."""
        while not self.aborted and (self._length is None or self.produced < count):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), timeout=self._seconds_until(count))
            except TimeoutError:
                continue

    def _count_after(self, elapsed_s: float) -> int:
        beyond_first_s = elapsed_s - self._pace.latency_s
        if beyond_first_s < 0:
            return 0
        if self._pace.token_latency_s == 0:
            return self._length or 0
        return 1 + int(beyond_first_s / self._pace.token_latency_s)

    def _seconds_until(self, count: int) -> float | None:
        if self._frozen_at is not None or self._length is None:
            return None
        duration_s = self._pace.latency_s + (count - 1) * self._pace.token_latency_s
        return max(0.001, self._started_at + duration_s - self._clock())
