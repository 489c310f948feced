"""How requests that anybody may send share a small part of the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slime_plugins.rollout_buffer.server.rate_limiter import RateLimiter


@dataclass
class Requester:
    name: str
    answered: int = 0
    is_lost: bool = False


async def asks(pace: RateLimiter, requester: Requester, order: list[str]) -> None:
    await pace.acquire(requester)
    order.append(requester.name)


async def test_a_few_requests_wait_for_nothing() -> None:
    pace = RateLimiter(per_s=0.001, at_once=5)
    for number in range(5):
        await asyncio.wait_for(pace.acquire(Requester(str(number))), 5)


async def test_who_was_answered_least_comes_first() -> None:
    pace = RateLimiter(per_s=20, at_once=1)
    await pace.acquire(Requester("takes what passes at once"))
    order: list[str] = []
    flood = [Requester(f"flood {number}", answered=100 + number) for number in range(5)]
    waiting = [asyncio.ensure_future(asks(pace, requester, order)) for requester in flood]
    await asyncio.sleep(0)
    waiting.append(asyncio.ensure_future(asks(pace, Requester("honest"), order)))
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert order == ["honest", *(requester.name for requester in flood)]


async def test_who_has_gone_and_who_is_cancelled_take_nobodys_turn() -> None:
    pace = RateLimiter(per_s=0.5, at_once=1)
    await pace.acquire(Requester("takes what passes at once"))
    order: list[str] = []
    gone = [asyncio.ensure_future(asks(pace, Requester("gone", is_lost=True), order)) for _ in range(50)]
    cancelled = [asyncio.ensure_future(asks(pace, Requester("cancelled"), order)) for _ in range(50)]
    await asyncio.sleep(0)
    for each in cancelled:
        each.cancel()
    last = asyncio.ensure_future(asks(pace, Requester("last"), order))
    await asyncio.wait_for(asyncio.gather(*gone, last), 30)  # at half a request a second they would take minutes
    assert set(order) == {"gone", "last"}
