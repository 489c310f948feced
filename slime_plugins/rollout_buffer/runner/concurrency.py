"""The limit of concurrent episodes of a job, and the controller that changes it (``num_process: auto``)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, ConcurrencyState, Load, Reason, adjust, initial_state
from slime_plugins.rollout_buffer.rules.heartbeats import CONCURRENCY
from slime_plugins.rollout_buffer.types import EngineTrouble

SAMPLE_INTERVAL_S = 2.0
MIN_WINDOW_S = 10.0
MIN_TURNS = 96
"""The throughput of fewer turns is dominated by chance."""
MIN_EPISODES = 32

logger = logging.getLogger(__name__)


class ConcurrencyLimiter:
    """A semaphore whose limit may change at any time; a lower limit takes nothing from present holders."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = asyncio.Event()
        self.taken = 0
        self.waiting = 0

    @property
    def limit(self) -> int:
        return self._limit

    def set_limit(self, limit: int) -> None:
        """Changes the limit. Holders beyond a lower limit stay; nobody acquires until fewer than the limit are left."""
        self._limit = limit
        self._changed.set()

    async def acquire(self) -> None:
        """Waits until there are fewer holders than the limit."""
        self.waiting += 1
        try:
            while self.taken >= self._limit:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.waiting -= 1
        self.taken += 1

    def release(self) -> None:
        self.taken -= 1
        self._changed.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Totals:
    """Totals of a job's episodes so far."""

    turns: int
    tokens: int
    episodes: int


@dataclass(slots=True)
class _Window:
    """Sums over the samples of a measuring window; ``loads`` is the number of samples with an engine's load."""

    began: float
    totals_before: _Totals
    samples: int = 0
    playing: int = 0
    running: int = 0
    waiting: int = 0
    loads: int = 0
    is_limiting: bool = False

    def add(self, playing: int, is_limiting: bool, load: EngineLoad | None) -> None:
        self.samples += 1
        self.playing += playing
        self.is_limiting = self.is_limiting or is_limiting
        if load is not None:
            self.loads += 1
            self.running += load.running
            self.waiting += load.waiting

    def load(self) -> Load:
        """Returns the mean load, without throughput and devices."""
        return Load(
            playing=self.playing / self.samples,
            is_limiting=self.is_limiting,
            engine_running=self.running / self.loads if self.loads else None,
            engine_waiting=self.waiting / self.loads if self.loads else None,
        )


class ConcurrencyController:
    """Changes the limit by ``rules.concurrency``, one step per measuring window.

    A window ends when at least ``MIN_TURNS`` turns, and as many as there are episodes, have returned. The first window
    after a change is discarded: its turns began before the change. A window that shows a queue in the engine, too few
    devices, or no waiting episode ends after ``MIN_WINDOW_S``. While the engine is unreachable or updates its weights,
    nothing is measured.
    """

    def __init__(
        self,
        limiter: ConcurrencyLimiter,
        bounds: Bounds,
        engine: HttpEngine,
        *,
        devices: Callable[[], Mapping[str, Any]],
        is_paused: Callable[[], bool],
        keep: Callable[[ConcurrencyState, EngineLoad | None], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``devices`` returns the latest device report, {} without devices; ``keep`` stores the state for other
        processes."""
        self._limiter, self._bounds, self._engine = limiter, bounds, engine
        self._devices, self._is_paused, self._keep, self._clock = devices, is_paused, keep, clock
        self._state = initial_state(bounds)
        self._episodes = 0
        self._is_steady = False
        self._window = self._new_window()
        self._kept_at = -CONCURRENCY.beats_every_s
        limiter.set_limit(self._state.limit)

    def episode_ended(self) -> None:
        """Counts an episode, for generators that do not call the engine through its client."""
        self._episodes += 1

    async def watch(self) -> None:
        """Samples until cancelled; an error is logged and leaves the limit as it is."""
        while True:
            try:
                await self.adjust()
            except Exception:
                logger.exception("the concurrency limit cannot be adjusted")
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def adjust(self) -> None:
        """Takes one sample, and changes the limit if the window is over."""
        load = await self._engine.load()
        if self._is_paused() or self._engine.report(while_idle=True).code is not EngineTrouble.NONE:
            self._is_steady, self._window = False, self._new_window()
        else:
            self._window.add(self._limiter.taken, self._limiter.waiting > 0, load)
            if (mean := self._measured_load()) is not None:
                self._step(mean)
        if self._clock() - self._kept_at >= CONCURRENCY.beats_every_s:
            self._kept_at = self._clock()
            await self._keep(self._state, load)

    def _measured_load(self) -> Load | None:
        """Returns the load of the window; None before its end."""
        if self._clock() - self._window.began < MIN_WINDOW_S:
            return None
        mean = self._with_devices(self._window.load())
        if adjust(self._state, mean, self._bounds).reason in (Reason.ENGINE_QUEUES, Reason.DEVICES, Reason.NOT_USED):
            return mean
        totals, before = self._totals(), self._window.totals_before
        turns = totals.turns - before.turns
        returned = max(turns, totals.episodes - before.episodes)
        if not self._is_steady:
            if returned >= mean.playing:
                self._is_steady, self._window = True, self._new_window()
            return None
        if returned < max(mean.playing, MIN_TURNS if turns else MIN_EPISODES):
            return None
        work = totals.tokens - before.tokens if turns else totals.episodes - before.episodes
        return replace(mean, rate=work / (self._clock() - self._window.began))

    def _step(self, mean: Load) -> None:
        before = self._state
        self._state = adjust(before, mean, self._bounds)
        if self._state.limit != before.limit:
            self._is_steady = False
            self._limiter.set_limit(self._state.limit)
            logger.info("concurrency limit %d, was %d: %s", self._state.limit, before.limit, self._state.reason)
        self._window = self._new_window()

    def _with_devices(self, load: Load) -> Load:
        report = self._devices()
        if not report:
            return load
        states = Counter(str(device["state"]) for device in report["devices"])
        waiting = sum(report.get("episodes_waiting", {}).values())
        return replace(load, devices_free=states["ready"], devices_waited_for=float(waiting))

    def _totals(self) -> _Totals:
        return _Totals(turns=self._engine.turns, tokens=self._engine.tokens, episodes=self._episodes)

    def _new_window(self) -> _Window:
        return _Window(began=self._clock(), totals_before=self._totals())
