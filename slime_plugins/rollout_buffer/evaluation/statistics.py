"""Pure: pass@k, and confidence intervals of rates.

Samples of one task are correlated, so the task is the unit: a rate is the mean over tasks of the solved share, and its
interval covers the random choice of the tasks.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 4000
MIN_RESAMPLES: Final = 1000
MAX_DRAWS: Final = 5_000_000
"""Above this number of draws, which are resamples times tasks, there are fewer than ``RESAMPLES`` resamples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over ``tasks`` tasks, and the ends of its interval."""

    value: float
    low: float
    high: float
    tasks: int


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Returns the chance that at least one of ``k`` samples solves a task that ``solved`` of ``samples`` solved.

    1 - C(n - c, k) / C(n, k) for c solved of n samples, which is unbiased: Chen et al., "Evaluating Large Language
    Models Trained on Code", 2021 (arXiv:2107.03374), equation 1. Whole numbers are used, because floating-point
    numbers would lose digits.

    Raises:
        ValueError: ``k`` is not in 1 … ``samples``, or ``solved`` not in 0 … ``samples``.
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"pass@{k} of {solved} solved among {samples} samples means nothing")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def wilson_interval(rate: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Returns the interval, within [0, 1], of a ``rate`` that was seen in ``size`` independent trials.

    Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927). ``size`` need not be
    whole: it may be an effective sample size.
    """
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    center = (rate + z * z / (2 * size)) / (1 + z * z / size)
    half_width = z / (1 + z * z / size) * math.sqrt(rate * (1 - rate) / size + z * z / (4 * size * size))
    low, high = max(0.0, center - half_width), min(1.0, center + half_width)
    return min(low, rate), max(high, rate)  # at rates 0 and 1, rounding could put the rate outside of the interval


def mean_over_tasks(shares: Sequence[float], independent_samples: float, confidence: float = CONFIDENCE) -> Estimate:
    """Returns the mean of the tasks' shares in [0, 1], with Wilson's interval for its effective size.

    The effective size is the number of independent samples whose rate would vary as much as the mean over these
    tasks: p (1 - p) / (variance / tasks). It is at least the number of tasks, and at most ``independent_samples``.
    With one sample per task the result is Wilson's own interval; correlated samples count less. After Korn and
    Graubard, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts Estimated from
    Survey Data", Survey Methodology 24 (1998).

    Raises:
        ValueError: there is no task.
    """
    if not shares:
        raise ValueError("a mean needs at least one task")
    tasks, mean = len(shares), statistics.fmean(shares)
    spread = statistics.pvariance(shares, mean)
    if mean in (0.0, 1.0):
        size: float = tasks  # the formula is 0 / 0; the smallest size gives the widest interval
    else:
        size = independent_samples if spread == 0 else tasks * mean * (1 - mean) / spread
    low, high = wilson_interval(mean, min(max(size, tasks), max(independent_samples, tasks)), confidence)
    return Estimate(value=mean, low=low, high=high, tasks=tasks)


def mean_difference(differences: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE) -> Estimate:
    """Returns the mean of paired differences, one for each task, with a bootstrap interval over the tasks.

    Percentile bootstrap (Efron, 1979), the same for the same ``seed``.

    Raises:
        ValueError: there is no task.
    """
    if not differences:
        raise ValueError("a mean needs at least one task")
    tasks = len(differences)
    resamples = max(MIN_RESAMPLES, min(RESAMPLES, MAX_DRAWS // tasks))
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(differences, k=tasks)) / tasks for _ in range(resamples))
    tail = (1 - confidence) / 2
    low, high = means[math.floor(tail * (resamples - 1))], means[math.ceil((1 - tail) * (resamples - 1))]
    return Estimate(value=statistics.fmean(differences), low=low, high=high, tasks=tasks)
