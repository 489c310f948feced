"""Durations of an episode's phases. Traces use the same phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from slime_plugins.rollout_buffer.observability import tracing
from slime_plugins.rollout_buffer.types import Generation


class PhaseTimer:
    """Sums seconds by phase. ``clock`` returns monotonic seconds. The phase ``generate`` is entered once per turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._requests: list[tuple[float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the duration of the context to ``name``, also after an exception."""
        start = self._clock()
        try:
            with tracing.phase(name):
                yield
        finally:
            end = self._clock()
            self._seconds[name] += end - start
            if name == "generate":
                self._requests.append((start, end))

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def with_environment_times(self, generations: Sequence[Generation]) -> tuple[Generation, ...]:
        """Returns the generations with the seconds from each reply to the next request; from the last reply, to now."""
        starts = [start for start, _ in self._requests[1:]] + [self._clock()]
        gaps = [start - end for start, (_, end) in zip(starts, self._requests, strict=False)]
        return tuple(replace(generation, environment_s=gap) for generation, gap in zip(generations, gaps, strict=False))
