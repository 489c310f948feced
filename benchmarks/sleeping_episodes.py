"""Episodes that sleep, for the comparison with slime's own asynchronous rollout. Pure; the same on both sides."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FAILURES_PER_S = 0.015
"""An episode of so many times this one's seconds fails for good with this probability for each of them."""
TOKENS_PER_S = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepingEpisode:
    """What one member of a group meets: how long it sleeps, whether it fails then, and what it earns.

    Seconds are log-normal with a mean of 1. Success halves with each second, failures rise with them.
    """

    seconds: float
    fails: bool
    reward: float

    @property
    def tokens(self) -> int:
        """How many tokens its reply has."""
        return max(1, round(TOKENS_PER_S * self.seconds))

    @classmethod
    def of(cls, seed: int, sigma: float, instance: int, slot: int) -> SleepingEpisode:
        """Returns the member's episode: always the same one."""
        chance = random.Random(f"{seed}/{sigma}/{instance}/{slot}")
        seconds = math.exp(sigma * chance.gauss(0, 1) - sigma * sigma / 2)
        fails = chance.random() < FAILURES_PER_S * seconds
        return cls(seconds=seconds, fails=fails, reward=float(chance.random() < 0.5**seconds))
