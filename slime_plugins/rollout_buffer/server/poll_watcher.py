"""Wakes waiting polls after commits: one query tells for all of them whether the database has changed.

A waiting poll is a future, not a thread. A single thread makes this query and, only after a change, checks each poll:
every 20 ms while a poll is new, and less often the longer the newest poll has waited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slime_plugins.rollout_buffer.errors import RolloutBufferError

MIN_INTERVAL_S = 0.02
MAX_INTERVAL_S = 0.1
INTERVAL_SHARE = 0.1
"""The interval is this share of the time that the newest poll has waited."""
MAX_WAITING = 1024
"""Largest number of waiting polls in a worker; further polls are answered at once."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    check: Callable[[], bool | None]
    news: asyncio.Future[bool]
    since: float


class PollWatcher:
    """Wakes polls that have something to take, or need not wait any longer."""

    def __init__(self, data_version: Callable[[], int]) -> None:
        """``data_version`` returns a number that changes with every commit."""
        self._data_version = data_version
        self._waiting: set[_Waiting] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="waiting polls")
        self._task: asyncio.Task[None] | None = None
        self._seen_version: int | None = None

    def has_room(self) -> bool:
        """Returns True if one more poll may wait."""
        return len(self._waiting) < MAX_WAITING

    async def wait(self, check: Callable[[], bool | None], limit_s: float) -> bool:
        """Returns the first result of ``check`` that is not None, or False after ``limit_s``.

        ``check`` is called in a thread, at once and after each change of the database.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(check, loop.create_future(), loop.time())
        self._waiting.add(waiting)
        self._seen_version = None  # so that earlier commits are checked, too
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            return await asyncio.wait_for(waiting.news, limit_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)

    def close(self) -> None:
        """Stops the thread."""
        self._thread.shutdown(wait=False)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            for waiting, news in await loop.run_in_executor(self._thread, self._polls_with_news):
                _resolve(waiting, news)
            await asyncio.sleep(self._interval_s(loop.time()))

    def _interval_s(self, now: float) -> float:
        waited_s = min((now - waiting.since for waiting in self._waiting), default=0.0)
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, INTERVAL_SHARE * waited_s))

    def _polls_with_news(self) -> list[tuple[_Waiting, bool]]:
        try:
            version = self._data_version()
            if version == self._seen_version:
                return []
            self._seen_version = version
            results = [(waiting, waiting.check()) for waiting in list(self._waiting)]
        except RolloutBufferError as error:
            logger.warning("waiting polls are woken without a check: %s", error.message)
            return [(waiting, True) for waiting in list(self._waiting)]
        return [(waiting, news) for waiting, news in results if news is not None]


def _resolve(waiting: _Waiting, news: bool) -> None:
    if not waiting.news.done():
        waiting.news.set_result(news)
