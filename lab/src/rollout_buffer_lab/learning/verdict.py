"""Pure: has the reward risen? Asked of the groups played at first and at last, whatever was delivered of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

ALPHA = 0.001
"""Chance of calling it a rise where groups of both ends are alike."""
MIN_EFFECT = 0.5
"""Least rise, in standard deviations of a group's mean: weights that wander without a signal move it a little."""
PERMUTATIONS = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The mean reward of the groups at both ends, and how likely such a rise is by chance alone."""

    rose: bool
    first: float
    last: float
    groups: tuple[int, int]
    chance: float
    effect: float

    @property
    def sentence(self) -> str:
        """The message at the end of the run."""
        numbers = (
            f"from {self.first:.3f} to {self.last:.3f} ({self.groups[0]} groups of the first steps, {self.groups[1]} "
            f"of the last; chance of it without a difference {self.chance:.2g}, {self.effect:+.1f} standard "
            "deviations of a group)"
        )
        return f"The reward rose, {numbers}." if self.rose else f"The reward did not rise: {numbers}."


def judge(first: Sequence[float], last: Sequence[float], seed: int = 0) -> Verdict:
    """Compares group means: a one-sided permutation test at ``ALPHA``, and an effect of ``MIN_EFFECT``.

    The groups are the unit, because members of one group share their instance. Permutation test: Fisher, "The Design
    of Experiments", 1935; with the observed order counted among the draws (Phipson and Smyth, 2010), so that the
    chance is never 0.

    Raises:
        ValueError: one of them has no group.
    """
    if not first or not last:
        raise ValueError("a comparison needs groups at both ends")
    rise = fmean(last) - fmean(first)
    deviation = math.sqrt((pvariance(first) * len(first) + pvariance(last) * len(last)) / (len(first) + len(last)))
    rng, both = random.Random(seed), [*first, *last]
    total, size, reached = sum(both), len(first), 0
    for _ in range(PERMUTATIONS):
        start = sum(rng.sample(both, size))
        reached += (total - start) / len(last) - start / size >= rise - 1e-12
    chance = (reached + 1) / (PERMUTATIONS + 1)
    effect = rise / deviation if deviation > 0 else math.copysign(math.inf, rise) if rise else 0.0
    return Verdict(
        rose=chance <= ALPHA and effect >= MIN_EFFECT,
        first=fmean(first),
        last=fmean(last),
        groups=(len(first), len(last)),
        chance=chance,
        effect=effect,
    )
