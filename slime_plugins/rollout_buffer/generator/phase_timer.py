"""Durations of an episode's phases. Traces use the same phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime_plugins.rollout_buffer.observability import tracing


class PhaseTimer:
    """Sums seconds by phase. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the context to ``name``, also after an exception."""
        start = self._clock()
        try:
            with tracing.phase(name):
                yield
        finally:
            self._seconds[name] += self._clock() - start

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)
