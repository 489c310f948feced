"""The limit of episodes that play at once, and what changes it: episodes that ended, the engine's queue, devices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, ConcurrencyState, Reason
from slime_plugins.rollout_buffer.runner.concurrency import ConcurrencyController, ConcurrencyLimiter
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble


async def test_a_lowered_limit_takes_no_place_away_and_gives_none_until_enough_are_released() -> None:
    places = ConcurrencyLimiter(3)
    for _ in range(3):
        await places.acquire()
    places.set_limit(1)
    waiting = asyncio.create_task(places.acquire())
    for still_taken in (2, 1):
        places.release()
        await asyncio.sleep(0)
        assert (places.taken, places.waiting) == (still_taken, 1)
    places.release()
    await waiting
    assert (places.taken, places.waiting) == (1, 0)


async def test_places_of_a_raised_limit_are_taken_at_once() -> None:
    places = ConcurrencyLimiter(1)
    waiting = [asyncio.create_task(places.acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    assert places.taken == 1
    places.set_limit(4)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (places.taken, places.waiting) == (4, 1)
    waiting[-1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert places.waiting == 0


class SaturatedEngine(HttpEngine):
    """Samples 10 tokens a second for each of at most ``knee`` episodes; the others wait. May report its load."""

    route = "/none"

    def __init__(self, knee: int, *, says_load: bool = False) -> None:
        super().__init__("http://127.0.0.1:9")
        self.knee, self.says_load, self.playing = knee, says_load, 0
        self.trouble = EngineTrouble.NONE

    async def load(self) -> EngineLoad | None:
        waiting = max(0, self.playing - self.knee)
        return EngineLoad(running=self.playing - waiting, waiting=waiting) if self.says_load else None

    def report(self, *, while_idle: bool = False) -> EngineReport:
        return EngineReport(code=self.trouble)

    def play(self, playing: int, seconds: float) -> None:
        self.playing = playing
        self.turns += playing
        self.tokens += int(10 * min(playing, self.knee) * seconds)


class ControlledLimit:
    """A limit with as many episodes as it lets play and one that waits, its controller, and their clock."""

    def __init__(self, engine: SaturatedEngine) -> None:
        self.engine, self.clock, self.reported = engine, SettableClock(1000.0), list[ConcurrencyState]()
        self.places, self.paused, self.farm = ConcurrencyLimiter(1), False, dict[str, Any]()
        self.places.waiting = 1
        self.controller = ConcurrencyController(
            self.places,
            Bounds(min_limit=8, max_limit=1024, step=8),
            engine,
            devices=lambda: self.farm,
            is_paused=lambda: self.paused,
            keep=self._keep,
            clock=self.clock,
        )

    async def _keep(self, state: ConcurrencyState, load: EngineLoad | None) -> None:
        self.reported.append(state)

    async def pass_time(self, samples: int) -> None:
        for _ in range(samples):
            self.clock.advance(6)
            self.places.taken = self.places.limit
            self.engine.play(self.places.limit, 6)
            await self.controller.adjust()


@pytest.mark.parametrize("says_load", [False, True])
async def test_the_limit_settles_near_what_the_engine_can_play_with_and_without_reported_load(says_load: bool) -> None:
    controlled = ControlledLimit(SaturatedEngine(100, says_load=says_load))
    assert controlled.places.limit == 16
    await controlled.pass_time(200)
    assert 75 <= controlled.places.limit <= 200
    assert controlled.reported[-1].limit == controlled.places.limit


async def test_the_limit_stays_while_the_engine_is_away_or_the_job_is_paused() -> None:
    for name, value in (("trouble", EngineTrouble.UPDATING), ("paused", True)):
        controlled = ControlledLimit(SaturatedEngine(100))
        setattr(controlled.engine if name == "trouble" else controlled, name, value)
        await controlled.pass_time(50)
        assert controlled.places.limit == 16


async def test_the_first_window_after_a_change_is_ignored() -> None:
    controlled = ControlledLimit(SaturatedEngine(1000))
    await controlled.pass_time(6)
    assert controlled.places.limit == 16, "the episodes that ended first had begun before the change"
    await controlled.pass_time(2)
    assert controlled.places.limit == 32


async def test_the_limit_is_at_most_one_above_the_number_of_devices() -> None:
    controlled = ControlledLimit(SaturatedEngine(1000))
    controlled.farm = {"devices": [{"state": "leased"}] * 16 + [{"state": "ready"}] * 4, "episodes_waiting": {}}
    await controlled.pass_time(8)
    assert controlled.places.limit == 21
    controlled.farm = {"devices": [{"state": "leased"}] * 20, "episodes_waiting": {"training": 1}}
    await controlled.pass_time(20)
    assert controlled.places.limit == 21
    assert controlled.reported[-1].reason is Reason.DEVICES
