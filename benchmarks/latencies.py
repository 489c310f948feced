"""Latencies of the scheduler benchmark, and the duration of an ideal schedule."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

STEP_S = (3.0, 7.0)
GENERATION_S = (1.0, 3.0)
TURNS = (5, 15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """Latencies of real devices and engines times ``scale``. Equal seeds give equal latencies, in every process."""

    seed: int
    scale: float

    def turns(self, position: int) -> int:
        """Returns the number of replies of the episode; the last one ends it."""
        return random.Random(f"{self.seed}/turns/{position}").randint(*TURNS)

    def step(self, position: int, number: int) -> float:
        """Returns the seconds of a device's action; number 0 is the reset."""
        return self.scale * random.Random(f"{self.seed}/step/{position}/{number}").uniform(*STEP_S)

    def generation(self, position: int, turn: int) -> float:
        """Seconds of the engine's reply in a turn, from 1."""
        return self.scale * random.Random(f"{self.seed}/generation/{position}/{turn}").uniform(*GENERATION_S)

    def device_s(self, position: int) -> float:
        """Seconds that the episode's device works: the reset, and an action for all replies but the last."""
        return sum(self.step(position, number) for number in range(self.turns(position)))

    def held_s(self, position: int) -> float:
        """Seconds for which the episode needs its device if nothing else takes time."""
        turns = range(1, self.turns(position) + 1)
        return self.device_s(position) + sum(self.generation(position, turn) for turn in turns)

    def ideal_s(self, episodes: int, devices: int) -> float:
        """Seconds of all episodes if each starts in order, as soon as a device is free, and nothing else takes time."""
        free_at = [0.0] * devices
        last_end = 0.0
        for position in range(episodes):
            end = heapq.heappop(free_at) + self.held_s(position)
            heapq.heappush(free_at, end)
            last_end = max(last_end, end)
        return last_end
