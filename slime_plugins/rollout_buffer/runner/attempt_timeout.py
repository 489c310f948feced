"""The time limit of an attempt, which alone stops a generator whose ``play()`` hangs.

The limit excludes the wait for a device (the phase ``acquire``): the length of the queue is no property of the episode,
and the device pool has its own limit for it.
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
MIN_CHECK_S = 0.5
"""Shortest interval between two checks of the limit."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class AttemptTimeout:
    """A tracer that measures an attempt without its waits for a device, and cancels the attempt at its limit."""

    def __init__(self, limit_s: float | None, tracer: Tracer) -> None:
        """If ``limit_s`` is None, there is no limit. Spans are passed on to ``tracer``."""
        self._limit_s = limit_s
        self._tracer = tracer
        self._began = self._now()
        self._waited_s = 0.0
        self._waits_since: float | None = None
        self._stopped: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @contextlib.contextmanager
    def span(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """Passes a span on; the clock is paused while the attempt waits for a device."""
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
        """Starts the attempt's coroutine as a task."""
        with traced_by(self):
            return asyncio.ensure_future(work)

    def stop(self) -> None:
        """Makes ``wait`` cancel the task, and return even if the task ignores that."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def wait(self, task: asyncio.Task[Result]) -> None:
        """Waits until the task is done, with or without an error, or ``stop`` was called.

        Raises:
            AttemptTimeoutError: the limit was reached, and the task was cancelled.
        """
        while not task.done():
            if self._stopped.done():
                await end_task(task)
                return
            left_s = self._left_s()
            if left_s is not None and left_s <= 0:
                reason = f"the attempt took longer than attempt_timeout_seconds ({self._limit_s:g} s) and was cancelled"
                if not await end_task(task):
                    reason += "; it ignores the cancellation and still holds its device and memory"
                raise AttemptTimeoutError(reason)
            timeout_s = None if left_s is None else max(left_s, MIN_CHECK_S)
            await asyncio.wait({task, self._stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

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
    """Cancels a task and returns True if it ended; a task that ignores cancellation is abandoned after a timeout."""
    task.cancel()
    await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
    if not task.done():
        logger.error("a task of the generator ignores its cancellation and is abandoned: %r", task)
        # Reads the late exception, which asyncio would otherwise log as never retrieved.
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
    return task.done()
