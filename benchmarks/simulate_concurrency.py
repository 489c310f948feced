"""Compares ``num_process: auto`` with fixed numbers of concurrent episodes, in a simulation.

    python -m benchmarks.simulate_concurrency
    python -m benchmarks.simulate_concurrency --hours 4 --seed 7 --json concurrency.json

Episodes share an engine and, if there are devices, each holds a device from its first turn to its last. The engine's
speed per request falls with the number of requests: full up to ``knee``, shared beyond, and beyond ``cache`` it
computes evicted prefixes again, so that more requests give less throughput. With ``max_running`` further requests
queue, and the engine reports the queue (``says_load``).

The runner's own ``ConcurrencyController`` over ``rules/concurrency.py`` runs on the simulation's clock. Output per
number: tokens per second as a share of the best fixed number's, the median duration of an episode (its first tokens are
so old at its end), and the numbers that auto chose in the second half. Everything follows from the seed.

Caveats: there is always an episode to start (no trainer limits them), one engine, and prompts cost nothing unless the
cache is too small.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.rules.concurrency import Bounds, ConcurrencyState
from slime_plugins.rollout_buffer.runner.concurrency import SAMPLE_INTERVAL_S, ConcurrencyController, ConcurrencyLimiter
from slime_plugins.rollout_buffer.types import EngineReport

FIXED = (8, 64, 512)
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine, and the load of episodes. Times in seconds, sizes in requests."""

    name: str
    knee: int
    """Number of requests at full speed; more share it."""
    cache: int = 100_000
    """Beyond this number, prefixes are evicted, and throughput falls as cache / requests."""
    max_running: int = 100_000
    says_load: bool = False
    devices: int | None = None
    device_s: float = 0.0
    """Per turn, on average."""
    turns: float = 8.0
    """Per episode, on average."""
    tokens: float = 200.0
    """Per turn, on average; heavy-tailed."""
    speed: float = 40.0
    """Tokens per second of one request at full speed."""


SETTINGS = (
    Setting(name="small engine", knee=12),
    Setting(name="engine that queues", knee=96, max_running=96, says_load=True),
    Setting(name="large engine", knee=400),
    Setting(name="cache too small", knee=48, cache=96),
    Setting(name="cache too small, queues", knee=48, cache=96, max_running=256, says_load=True),
    Setting(name="64 devices", knee=400, devices=64, device_s=5.0),
    Setting(name="single turns", knee=150, turns=1.0, tokens=800.0),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result for one number of episodes."""

    policy: str
    tokens_per_s: float
    episode_s: float
    """Median, from the start of an episode to its end."""
    limits: tuple[int, int, int]
    """Limit of concurrent episodes in the second half: lowest, median, highest."""


class _SimulatedEngine(HttpEngine):
    """The engine interface that the controller uses, answered by the simulation."""

    route = "/none"

    def __init__(self, simulation: Simulation) -> None:
        super().__init__("http://127.0.0.1:9")
        self.simulation = simulation

    def sampled(self, tokens: float) -> None:
        self.turns += 1
        self.tokens += round(tokens)

    async def load(self) -> EngineLoad | None:
        """Returns what SGLang's route would; None if the setting has no such route."""
        if not self.simulation.setting.says_load:
            return None
        return EngineLoad(running=len(self.simulation.running), waiting=len(self.simulation.queue))

    def report(self, *, while_idle: bool = False) -> EngineReport:
        """Reports no trouble."""
        return EngineReport()


@dataclass
class _Episode:
    began: float
    turns: int


class Simulation:
    """One setting with one policy. Requests share the engine equally at any moment."""

    def __init__(self, setting: Setting, limit: int | None, *, seconds: float, seed: int) -> None:
        """``limit`` None is auto."""
        self.setting, self.limit, self.seconds = setting, limit, seconds
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, _Episode]] = []
        self.running: list[tuple[float, int, _Episode, float]] = []
        """A heap of requests: ``tokens_each`` when it is complete, a number, its episode and its tokens."""
        self.tokens_each = 0.0
        """Tokens that a request would have that ran since the beginning."""
        self.queue: deque[tuple[_Episode, float]] = deque()
        self.free = setting.devices  # None without devices
        self.waiting_for_device: deque[_Episode] = deque()
        self.limiter = ConcurrencyLimiter(limit or 1)
        self.limiter.waiting = 1  # there is always an episode to start
        self.engine = _SimulatedEngine(self)
        self.durations: list[float] = []
        self.tokens = 0.0
        self.limits: list[int] = []
        self.count = 0

    async def run(self) -> Result:
        """Runs for the requested time. Tokens are counted after the first tenth, limits in the second half."""
        controller = self._controller() if self.limit is None else None
        counted_from, before = self.seconds / 10, 0.0
        next_sample = 0.0
        self._fill()
        while self.now < self.seconds:
            self._advance_to(min(next_sample, self._next_event()))
            if self.now >= next_sample:
                next_sample += SAMPLE_INTERVAL_S
                if controller is not None:
                    await controller.adjust()
                if self.now > self.seconds / 2:
                    self.limits.append(self.limiter.limit)
            if self.now < counted_from:
                before = self.tokens
            self._fill()
        limits = (min(self.limits), round(statistics.median(self.limits)), max(self.limits))
        policy = "auto" if self.limit is None else str(self.limit)
        rate = (self.tokens - before) / (self.seconds - counted_from)
        return Result(policy=policy, tokens_per_s=rate, episode_s=statistics.median(self.durations), limits=limits)

    def _controller(self) -> ConcurrencyController:
        async def keep(state: ConcurrencyState, load: EngineLoad | None) -> None:
            """Does nothing."""

        bounds = Bounds(min_limit=GROUP_SIZE, max_limit=1024, step=GROUP_SIZE)
        return ConcurrencyController(
            self.limiter,
            bounds,
            self.engine,
            devices=self._device_report,
            is_paused=lambda: False,
            keep=keep,
            clock=lambda: self.now,
        )

    def _device_report(self) -> dict[str, Any]:
        if self.setting.devices is None or self.free is None:
            return {}
        states = ["ready"] * self.free + ["leased"] * (self.setting.devices - self.free)
        return {
            "devices": [{"state": state} for state in states],
            "episodes_waiting": {"training": len(self.waiting_for_device)},
        }

    # --- the engine --------------------------------------------------------------------------------------------------

    def _speed(self) -> float:
        """Returns tokens per second of each running request."""
        count = len(self.running)
        if count == 0:
            return 0.0
        engine_speed = min(count, self.setting.knee) * self.setting.speed
        return engine_speed * min(1.0, self.setting.cache / count) / count

    def _next_event(self) -> float:
        time = self.events[0][0] if self.events else float("inf")
        if self.running:
            time = min(time, self.now + max(0.0, self.running[0][0] - self.tokens_each) / self._speed())
        return time

    def _advance_to(self, time: float) -> None:
        self.tokens_each += self._speed() * (time - self.now)
        self.now = time
        while self.running and self.running[0][0] <= self.tokens_each + 1e-6:
            _, _, episode, tokens = heapq.heappop(self.running)
            self.tokens += tokens
            self.engine.sampled(tokens)
            self._turn_is_over(episode)
        while self.events and self.events[0][0] <= self.now:
            self._ask(heapq.heappop(self.events)[2])
        while self.queue and len(self.running) < self.setting.max_running:
            self._start(*self.queue.popleft())

    def _ask(self, episode: _Episode) -> None:
        self.queue.append((episode, self.setting.tokens * self.rng.lognormvariate(-0.32, 0.8)))  # its mean is 1

    def _start(self, episode: _Episode, tokens: float) -> None:
        heapq.heappush(self.running, (self.tokens_each + tokens, self._number(), episode, tokens))

    # --- episodes ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self.limiter.taken < self.limiter.limit:
            self.limiter.taken += 1
            turns = 1 if self.setting.turns == 1 else max(1, round(self.rng.expovariate(1 / self.setting.turns)))
            self.waiting_for_device.append(_Episode(self.now, turns))
        while self.waiting_for_device and self.free != 0:
            episode = self.waiting_for_device.popleft()
            if self.free is not None:
                self.free -= 1
            self._ask_later(episode)
        while self.queue and len(self.running) < self.setting.max_running:
            self._start(*self.queue.popleft())

    def _ask_later(self, episode: _Episode) -> None:
        pause = self.rng.expovariate(1 / self.setting.device_s) if self.setting.device_s else 0.0
        heapq.heappush(self.events, (self.now + pause, self._number(), episode))

    def _turn_is_over(self, episode: _Episode) -> None:
        episode.turns -= 1
        if episode.turns:
            self._ask_later(episode)
            return
        self.durations.append(self.now - episode.began)
        self.limiter.taken -= 1
        if self.free is not None:
            self.free += 1

    def _number(self) -> int:
        """Returns a new number, which orders heap entries of equal time."""
        self.count += 1
        return self.count


def compare(setting: Setting, *, hours: float, seed: int) -> list[Result]:
    """Returns the results of each fixed number, and of auto."""
    policies = (*FIXED, None)
    runs = (Simulation(setting, limit, seconds=hours * 3600, seed=seed) for limit in policies)
    return [asyncio.run(run.run()) for run in runs]


def share_of_best(results: Sequence[Result]) -> dict[str, float]:
    """Returns by policy the tokens per second relative to the best fixed number."""
    best = max(result.tokens_per_s for result in results if result.policy != "auto")
    return {result.policy: result.tokens_per_s / best for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    table = Table()
    for column in ("setting", "at once", "tokens/s", "of the best", "episode s", "limit"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    report = []
    for setting in SETTINGS:
        results = compare(setting, hours=options.hours, seed=options.seed)
        shares = share_of_best(results)
        for result in results:
            limits = f"{result.limits[1]} ({result.limits[0]}–{result.limits[2]})" if result.policy == "auto" else ""
            table.add_row(
                *(setting.name, result.policy, f"{result.tokens_per_s:.0f}", f"{shares[result.policy]:.0%}"),
                *(f"{result.episode_s:.0f}", limits),
            )
        table.add_section()
        report.append({"setting": asdict(setting), "results": [asdict(result) for result in results]})
    Console(width=100).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
