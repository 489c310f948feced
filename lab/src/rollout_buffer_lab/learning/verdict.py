"""Pure: judges whether the reward rose, from all groups played in the first and in the last steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

ALPHA = 0.001
"""Largest chance of a wrong verdict "rose", if the groups of both ends are alike."""
MIN_EFFECT = 0.5
"""Smallest rise, in standard deviations of a group's mean: weights that drift without a signal move it a little."""
PERMUTATIONS = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The mean rewards and numbers of groups of the first and the last steps.

    ``chance`` is how likely such a rise is by chance alone; ``effect`` is the rise in standard deviations of a group.
    """

    rose: bool
    first: float
    last: float
    group_counts: tuple[int, int]
    chance: float
    effect: float

    @property
    def sentence(self) -> str:
        """The message at the end of the run."""
        numbers = (
            f"from {self.first:.3f} to {self.last:.3f} ({self.group_counts[0]} groups of the first steps, "
            f"{self.group_counts[1]} of the last; chance of it without a difference {self.chance:.2g}, "
            f"{self.effect:+.1f} standard deviations of a group)"
        )
        return f"The reward rose, {numbers}." if self.rose else f"The reward did not rise: {numbers}."


def judge(first: Sequence[float], last: Sequence[float], seed: int = 0) -> Verdict:
    """Compares group means: a one-sided permutation test at ``ALPHA``, and an effect of ``MIN_EFFECT``.

    The groups are the unit, because members of one group share their instance. Permutation test: Fisher, "The Design
    of Experiments", 1935; with the observed order counted among the draws (Phipson and Smyth, 2010), so that the
    chance is never 0.

    Raises:
        ValueError: ``first`` or ``last`` is empty.
    """
    if not first or not last:
        raise ValueError("a comparison needs groups at both ends")
    rise = fmean(last) - fmean(first)
    deviation = math.sqrt((pvariance(first) * len(first) + pvariance(last) * len(last)) / (len(first) + len(last)))
    rng, means = random.Random(seed), [*first, *last]
    total, reached_count = sum(means), 0
    for _ in range(PERMUTATIONS):
        first_sum = sum(rng.sample(means, len(first)))
        permuted_rise = (total - first_sum) / len(last) - first_sum / len(first)
        reached_count += permuted_rise >= rise - 1e-12  # equal sums differ by rounding
    chance = (reached_count + 1) / (PERMUTATIONS + 1)
    effect = 0.0
    if rise:
        effect = rise / deviation if deviation > 0 else math.copysign(math.inf, rise)
    return Verdict(
        rose=chance <= ALPHA and effect >= MIN_EFFECT,
        first=fmean(first),
        last=fmean(last),
        group_counts=(len(first), len(last)),
        chance=chance,
        effect=effect,
    )
