"""Group commit of an event loop: the bodies that arrive during a commit share the next one, with one fsync.

There is no gathering time: a body that finds no commit under way is committed at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_BATCH_BODIES = 64
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Limits of a batch: its number of bodies and their size. Without them one batch would answer all clients, and the disk
would idle until they send again."""

Body = TypeVar("Body", bound=Sized)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Body, Result]):
    body: Body
    result: asyncio.Future[Result]


class WriteBatcher(Generic[Body, Result]):
    """Commits the bodies of many coroutines in batches, one batch at a time."""

    def __init__(self, commit: Callable[[Sequence[Body]], Sequence[Result]], executor: Executor) -> None:
        """``commit`` runs in the executor, one batch at a time, and returns a result for each body."""
        self._commit = commit
        self._executor = executor
        self._waiting: deque[_Waiting[Body, Result]] = deque()
        self._busy = False

    async def write(self, body: Body) -> Result:
        """Returns the result of a body, after its commit.

        Raises:
            Exception: any error of ``commit``, for all bodies of the batch.
        """
        loop = asyncio.get_running_loop()
        waiting: _Waiting[Body, Result] = _Waiting(body, loop.create_future())
        self._waiting.append(waiting)
        if not self._busy:
            self._busy = True
            loop.call_soon(self._begin)  # lets bodies of this loop iteration join the batch
        return await waiting.result

    def _begin(self) -> None:
        batch = self._next_batch()
        bodies = [waiting.body for waiting in batch]
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._commit, bodies)
        future.add_done_callback(lambda done: self._end(batch, done))

    def _next_batch(self) -> list[_Waiting[Body, Result]]:
        batch = [self._waiting.popleft()]
        size = len(batch[0].body)
        while self._waiting and len(batch) < MAX_BATCH_BODIES:
            size += len(self._waiting[0].body)
            if size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _end(self, batch: Sequence[_Waiting[Body, Result]], done: asyncio.Future[Sequence[Result]]) -> None:
        error = done.exception()
        for index, waiting in enumerate(batch):
            if waiting.result.done():
                continue  # its client was answered: the server is stopping
            if error is not None:
                waiting.result.set_exception(error)
            else:
                waiting.result.set_result(done.result()[index])
        if self._waiting:
            self._begin()
        else:
            self._busy = False
