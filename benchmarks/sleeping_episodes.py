"""Episodes that sleep, for the comparison with slime's own asynchronous rollout. Pure; the same on both sides."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

FAILURES_PER_S = 0.015
"""Probability of failure for each second of an episode; a failing episode fails in every attempt."""
TOKENS_PER_S = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepingEpisode:
    """The episode of one member of a group: how long it sleeps, whether it then fails, and its reward.

    Seconds are log-normal with a mean of 1. The probability of success halves with each second, that of failure
    rises with them.
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
        rng = random.Random(f"{seed}/{sigma}/{instance}/{slot}")
        seconds = math.exp(sigma * rng.gauss(0, 1) - sigma * sigma / 2)
        fails = rng.random() < FAILURES_PER_S * seconds
        return cls(seconds=seconds, fails=fails, reward=float(rng.random() < 0.5**seconds))
