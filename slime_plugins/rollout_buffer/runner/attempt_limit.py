"""How long an attempt may play: nothing else ends a generator's ``play()`` that hangs.

The limit counts what the episode does by itself, not its wait for a device (the phase ``acquire``): how long a queue is
says nothing of the episode, and the device pool has a limit of its own for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.errors import AttemptTimeoutError
from slime_plugins.rollout_buffer.observability.tracing import Attributes, Span, Tracer, traced_by
from slime_plugins.rollout_buffer.rules.trajectory_stats import WAITING

STOP_TIMEOUT_S = 20.0
MIN_LOOK_S = 0.5

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class AttemptLimit:
    """A tracer for the phases of one attempt that counts its seconds, and ends it when they are used up."""

    def __init__(self, limit_s: float | None, tracer: Tracer) -> None:
        """``limit_s`` is None for an attempt that may take for ever; ``tracer`` gets every span."""
        self._limit_s = limit_s
        self._tracer = tracer
        self._began = self._now()
        self._waited_s = 0.0
        self._waits_since: float | None = None

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """Passes a span on; the clock stands still in one that waits for a device."""
        if name in WAITING:
            self._waits_since = self._now()
        try:
            with self._tracer.span(name, attributes) as span:
                yield span
        finally:
            if name in WAITING and self._waits_since is not None:
                self._waited_s += self._now() - self._waits_since
                self._waits_since = None

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Begins the attempt's work as a task of its own."""
        with traced_by(self):
            return asyncio.ensure_future(work)

    async def wait(self, task: asyncio.Task[Result]) -> None:
        """Waits until the task is done, whatever came of it.

        Raises:
            AttemptTimeoutError: it was not within the limit, and was cancelled.
        """
        while not task.done():
            left_s = self._left_s()
            if left_s is not None and left_s <= 0:
                limit = f"the attempt took longer than attempt_timeout_seconds ({self._limit_s:g} s) and was cancelled"
                if not await end_task(task):
                    limit += "; it ignores that, and still holds what it had"
                raise AttemptTimeoutError(limit)
            await asyncio.wait({task}, timeout=None if left_s is None else max(left_s, MIN_LOOK_S))

    def _left_s(self) -> float | None:
        if self._limit_s is None:
            return None
        now = self._now()
        waits_s = 0.0 if self._waits_since is None else now - self._waits_since
        return self._limit_s - (now - self._began - self._waited_s - waits_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def end_task(task: asyncio.Task[Any]) -> bool:
    """Cancels a task and returns whether it ended; one that ignores its cancellation is left behind after a while."""
    task.cancel()
    await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
    if not task.done():
        logger.error("a task of the generator ignores its cancellation and is left behind: %r", task)
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
    return task.done()
