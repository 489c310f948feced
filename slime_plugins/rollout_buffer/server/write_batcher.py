"""Many requests, one commit: the bodies that arrive while the last ones are kept are kept next, with one fsync."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_TOGETHER = 64
MAX_BYTES_TOGETHER = 8 * 1024 * 1024
"""Clients that are answered send their next items while those of others are kept: all at once, each would wait for the
other."""

Body = TypeVar("Body", bound=Sized)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Body, Result]):
    body: Body
    result: asyncio.Future[Result]


class WriteBatcher(Generic[Body, Result]):
    """The queue between connections and the disk. It holds one body for each connection at most."""

    def __init__(self, keep: Callable[[Sequence[Body]], Sequence[Result]], executor: Executor) -> None:
        """``keep`` is called in the executor, one batch at a time, and returns a result for each body."""
        self._keep = keep
        self._executor = executor
        self._waiting: deque[_Waiting[Body, Result]] = deque()
        self._in_work = False

    async def write(self, body: Body) -> Result:
        """Returns what became of a body once it is kept.

        Raises:
            Exception: what ``keep`` raised for its batch.
        """
        loop = asyncio.get_running_loop()
        waiting: _Waiting[Body, Result] = _Waiting(body, loop.create_future())
        self._waiting.append(waiting)
        if not self._in_work:
            self._in_work = True
            loop.call_soon(self._begin)  # after what else has just arrived
        return await waiting.result

    def _begin(self) -> None:
        batch = self._next_batch()
        bodies = [waiting.body for waiting in batch]
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._keep, bodies)
        future.add_done_callback(lambda done: self._end(batch, done))

    def _next_batch(self) -> list[_Waiting[Body, Result]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].body)
        while self._waiting and len(batch) < MAX_TOGETHER:
            size += len(self._waiting[0].body)
            if size > MAX_BYTES_TOGETHER:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _end(self, batch: Sequence[_Waiting[Body, Result]], done: asyncio.Future[Sequence[Result]]) -> None:
        error = done.exception()
        results = [None] * len(batch) if error is not None else done.result()
        for waiting, result in zip(batch, results, strict=True):
            if waiting.result.done():
                continue  # the server stops: nobody waits any more
            if error is not None:
                waiting.result.set_exception(error)
            elif result is not None:
                waiting.result.set_result(result)
        if self._waiting:
            self._begin()
        else:
            self._in_work = False
