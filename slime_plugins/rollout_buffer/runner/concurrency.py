"""How many episodes of a job play at once, and what changes that limit where it is not fixed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.http import HttpEngine
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, Load, Reason, Steering, first_steering, steer
from slime_plugins.rollout_buffer.rules.heartbeats import CONCURRENCY
from slime_plugins.rollout_buffer.types import EngineTrouble

SAMPLE_INTERVAL_S = 2.0
MIN_WINDOW_S = 10.0
MIN_TURNS = 96
"""What fewer bring differs by chance as much as by how many play."""
MIN_EPISODES = 32

logger = logging.getLogger(__name__)


class ConcurrencyLimiter:
    """A semaphore whose limit may change at any time: what is acquired stays acquired."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = asyncio.Event()
        self.taken = 0
        self.wanted = 0
        """How many wait to acquire."""

    @property
    def limit(self) -> int:
        """How many may be acquired."""
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Changes it; where it is below what is acquired, nothing more is until enough was released."""
        self._limit = limit
        self._changed.set()

    async def acquire(self) -> None:
        """Acquires one as soon as fewer than the limit are."""
        self.wanted += 1
        try:
            while self.taken >= self._limit:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.wanted -= 1
        self.taken += 1

    def release(self) -> None:
        """Releases one."""
        self.taken -= 1
        self._changed.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """What has come of a job's episodes so far."""

    turns: int
    tokens: int
    episodes: int


@dataclass(slots=True)
class _Window:
    """What was seen since some moment."""

    began: float
    counted: _Counted
    samples: int = 0
    playing: int = 0
    running: int = 0
    waiting: int = 0
    loads: int = 0
    wanted: bool = False

    def add(self, playing: int, wanted: bool, load: EngineLoad | None) -> None:
        self.samples += 1
        self.playing += playing
        self.wanted = self.wanted or wanted
        if load is not None:
            self.loads += 1
            self.running += load.running
            self.waiting += load.waiting

    def load(self) -> Load:
        """Without what came of it, and without devices."""
        return Load(
            playing=self.playing / self.samples,
            wanted=self.wanted,
            engine_running=self.running / self.loads if self.loads else None,
            engine_waiting=self.waiting / self.loads if self.loads else None,
        )


class ConcurrencyController:
    """Changes the limit by ``rules.concurrency``, one step for each window of time.

    A window lasts until as many turns came back as episodes play, so that all of them are part of what is measured, and
    not before there are enough of them. The first after a change is let go: its turns began before. An engine that
    queues is answered at once. While the engine answers nobody, or its weights are updated, nothing is measured.
    """

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        bounds: Bounds,
        engine: HttpEngine,
        *,
        devices: Callable[[], Mapping[str, Any]],
        is_paused: Callable[[], bool],
        keep: Callable[[Steering, EngineLoad | None], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``devices`` is the newest report of the devices, {} where there are none; ``keep`` tells others."""
        self._limiter, self._bounds, self._engine = limiter, bounds, engine
        self._devices, self._is_paused, self._keep, self._clock = devices, is_paused, keep, clock
        self._steering = first_steering(bounds)
        self._episodes = 0
        self._is_steady = False
        self._window = self._new_window()
        self._kept_at = -CONCURRENCY.beats_every_s
        limiter.set_limit(self._steering.limit)

    def episode_ended(self) -> None:
        """Another one came to its end: what counts where the engine is not asked through its client."""
        self._episodes += 1

    async def watch(self) -> None:
        """Adjusts for ever; what breaks in it costs the job nothing."""
        while True:
            try:
                await self.adjust()
            except Exception:
                # The job plays on with the number that it has.
                logger.exception("the number of episodes at once cannot be adjusted")
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def adjust(self) -> None:
        """Takes one sample, and a step when a window is over."""
        load = await self._engine.load()
        if self._is_paused() or self._engine.report(unasked=True).code is not EngineTrouble.NONE:
            self._is_steady, self._window = False, self._new_window()
        else:
            self._window.add(self._limiter.taken, self._limiter.wanted > 0, load)
            if (seen := self._measured_load()) is not None:
                self._step(seen)
        if self._clock() - self._kept_at >= CONCURRENCY.beats_every_s:
            self._kept_at = self._clock()
            await self._keep(self._steering, load)

    def _measured_load(self) -> Load | None:
        """What the window says; None while it is too early to say."""
        if self._clock() - self._window.began < MIN_WINDOW_S:
            return None
        seen = self._with_devices(self._window.load())
        if steer(self._steering, seen, self._bounds).reason in (Reason.ENGINE_QUEUES, Reason.DEVICES, Reason.NOT_USED):
            return seen
        counted, before = self._counted(), self._window.counted
        turns = counted.turns - before.turns
        came_back = max(turns, counted.episodes - before.episodes)
        if not self._is_steady:
            if came_back >= seen.playing:
                self._is_steady, self._window = True, self._new_window()
            return None
        if came_back < max(seen.playing, MIN_TURNS if turns else MIN_EPISODES):
            return None
        work = counted.tokens - before.tokens if turns else counted.episodes - before.episodes
        return replace(seen, rate=work / (self._clock() - self._window.began))

    def _step(self, seen: Load) -> None:
        before = self._steering
        self._steering = steer(before, seen, self._bounds)
        if self._steering.limit != before.limit:
            self._is_steady = False
            self._limiter.set_limit(self._steering.limit)
            logger.info("%d episodes at once, after %d: %s", self._steering.limit, before.limit, self._steering.reason)
        self._window = self._new_window()

    def _with_devices(self, seen: Load) -> Load:
        report = self._devices()
        if not report:
            return seen
        states = Counter(str(device["state"]) for device in report["devices"])
        waiting = sum(report.get("episodes_waiting", {}).values())
        return replace(seen, devices_free=states["ready"], devices_waited_for=float(waiting))

    def _counted(self) -> _Counted:
        return _Counted(turns=self._engine.turns, tokens=self._engine.tokens, episodes=self._episodes)

    def _new_window(self) -> _Window:
        return _Window(began=self._clock(), counted=self._counted())
