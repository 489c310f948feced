"""How fast the requests are answered that anybody may send: a flood of them takes a small part of the server's time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Protocol


class Requester(Protocol):
    """Whose request waits."""

    answered: int
    is_lost: bool


class RateLimiter:
    """A token bucket. Of those that wait, first comes who was answered least: a flood waits behind its own requests."""

    def __init__(self, per_s: float, at_once: int) -> None:
        """``per_s`` requests pass in the long run, ``at_once`` of them after a pause."""
        self._per_s = per_s
        self._at_once = float(at_once)
        self._left = float(at_once)
        self._counted_at = 0.0
        self._waiting: list[tuple[int, int, Requester, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, requester: Requester) -> None:
        """Returns when the request may be answered; who is gone by then costs the others nothing."""
        if not self._waiting and self._take():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (requester.answered, next(self._numbers), requester, future))
        self._wait_on()
        await future

    def _take(self) -> bool:
        now = asyncio.get_running_loop().time()
        self._left = min(self._at_once, self._left + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _wait_on(self) -> None:
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(1 / self._per_s, self._let_pass)

    def _let_pass(self) -> None:
        self._timer = None
        while self._waiting:
            _, _, requester, future = self._waiting[0]
            if not (requester.is_lost or future.done()) and not self._take():
                break
            heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
        self._wait_on()
