"""Pure: is what is trained what was submitted? By playing time, turns, success and task of the groups that are over.

The test for slow tasks is Mann and Whitney's: of the groups that were lost, and not for their rewards, are the playing
times larger than those of the trained ones? One-sided, by the normal approximation with ties. It asks nothing of the
distribution of times, whose tails are heavy.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["BiasRow", "FinishedGroup", "GroupOutcome", "SlowLoss", "bias_measures", "bias_table", "slow_loss"]

FEWEST_GROUPS = 16
"""Of fewer groups nothing is said."""
FEWEST_LOST = 5
SIGNIFICANT = 0.01
QUARTERS = ("fastest quarter", "second", "third", "slowest quarter")
FEWEST_TURNS = ("fewest turns", "second", "third", "most turns")
SOLVED = ("none solved it", "some solved it", "all solved it")
MOST_TASKS = 8


class GroupOutcome(Enum):
    """What became of a group that is over."""

    TRAINED = "trained"
    FILTERED = "filtered"  # for its rewards: it would have taught nothing
    LOST = "lost"  # too old, timed out, or too few of its members could be played


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """A group that is over. ``success`` and ``turns`` are means over its members, None where no one knows."""

    fate: GroupOutcome
    seconds: float
    task: str
    turns: float | None = None
    success: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasRow:
    """How many groups of one kind were submitted and are over, and what became of them."""

    by: str
    name: str
    submitted: int
    trained: int
    filtered: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLoss:
    """Slow groups are lost more often than chance explains."""

    lost: int
    trained_share_of_slowest: float
    trained_share: float
    p_value: float


NameOf = Callable[[FinishedGroup], str | None]


def bias_table(groups: Sequence[FinishedGroup]) -> list[BiasRow]:
    """Returns the rows of all kinds: by duration, turns and success, and the tasks that differ most.

    Empty while too few groups are over.
    """
    if len(groups) < FEWEST_GROUPS:
        return []
    kinds = _kinds(groups)
    tasks = _rows("task", groups, kinds["task"], sorted({group.task for group in groups}))
    tasks.sort(key=lambda row: row.trained / row.submitted)
    return [
        *_rows("duration", groups, kinds["duration"], QUARTERS),
        *_rows("turns", groups, kinds["turns"], FEWEST_TURNS),
        *_rows("success", groups, kinds["success"], SOLVED),
        *tasks[:MOST_TASKS],
    ]


def bias_measures(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """Returns the total variation between trained and submitted groups, by kind; {} while too few are over or trained.

    0 is none, 1 all. ``slowest`` is the slowest quarter's share of the trained groups over its share of the submitted.
    """
    trained = [group for group in groups if group.fate is GroupOutcome.TRAINED]
    if len(groups) < FEWEST_GROUPS or not trained:
        return {}
    kinds = _kinds(groups)
    measures = {name: _distance(groups, trained, kind) for name, kind in kinds.items()}
    is_slow = kinds["duration"]
    slowest = [sum(is_slow(group) == QUARTERS[-1] for group in these) / len(these) for these in (trained, groups)]
    if slowest[1]:
        measures["slowest"] = slowest[0] / slowest[1]
    return measures


def slow_loss(groups: Sequence[FinishedGroup]) -> SlowLoss | None:
    """Returns what says that slow groups are lost more often, where a test at the level of 1 % says so; else None."""
    lost = [group.seconds for group in groups if group.fate is GroupOutcome.LOST]
    trained = [group.seconds for group in groups if group.fate is GroupOutcome.TRAINED]
    if len(lost) < FEWEST_LOST or len(lost) + len(trained) < FEWEST_GROUPS or not trained:
        return None
    p_value = larger_p_value(lost, trained)
    if p_value >= SIGNIFICANT:
        return None
    edge = sorted(lost + trained)[3 * (len(lost) + len(trained)) // 4]
    slow = [sum(seconds >= edge for seconds in these) for these in (trained, lost)]
    return SlowLoss(
        lost=len(lost),
        trained_share_of_slowest=slow[0] / (slow[0] + slow[1]),
        trained_share=len(trained) / (len(lost) + len(trained)),
        p_value=p_value,
    )


def larger_p_value(these: Sequence[float], those: Sequence[float]) -> float:
    """Returns the one-sided p-value of Mann and Whitney's test that ``these`` are larger; 1 where all are equal."""
    both = sorted([*these, *those])
    n, m = len(these), len(those)
    rank_sum = math.fsum((bisect.bisect_left(both, one) + bisect.bisect_right(both, one) + 1) / 2 for one in these)
    u = rank_sum - n * (n + 1) / 2
    ties = math.fsum(count**3 - count for count in Counter(both).values())
    variance = n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 1.0
    z = (u - n * m / 2 - 0.5) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def _kinds(groups: Sequence[FinishedGroup]) -> dict[str, NameOf]:
    """What names the kind of a group, by what is looked at."""
    turns = [group.turns for group in groups if group.turns is not None]
    return {
        "duration": _quarter([group.seconds for group in groups], QUARTERS, lambda group: group.seconds),
        "turns": _quarter(turns, FEWEST_TURNS, lambda group: group.turns),
        "success": _success,
        "task": lambda group: group.task,
    }


def _quarter(
    values: Sequence[float], names: Sequence[str], value_of: Callable[[FinishedGroup], float | None]
) -> NameOf:
    """Returns what names the quarter of a group; equal values share one."""
    edges = [sorted(values)[len(values) * quarter // 4] for quarter in (1, 2, 3)] if values else []

    def name(group: FinishedGroup) -> str | None:
        value = value_of(group)
        return None if value is None else names[bisect.bisect_right(edges, value)]

    return name


def _success(group: FinishedGroup) -> str | None:
    if group.success is None:
        return None
    return SOLVED[0] if group.success <= 0 else SOLVED[2] if group.success >= 1 else SOLVED[1]


def _rows(by: str, groups: Sequence[FinishedGroup], name_of: NameOf, names: Sequence[str]) -> list[BiasRow]:
    counted = Counter((name_of(group), group.fate) for group in groups)
    rows = [
        BiasRow(
            by=by,
            name=name,
            submitted=sum(counted[name, fate] for fate in GroupOutcome),
            trained=counted[name, GroupOutcome.TRAINED],
            filtered=counted[name, GroupOutcome.FILTERED],
        )
        for name in names
    ]
    return [row for row in rows if row.submitted]


def _distance(groups: Sequence[FinishedGroup], trained: Sequence[FinishedGroup], name_of: NameOf) -> float:
    all_of, of_trained = Counter(map(name_of, groups)), Counter(map(name_of, trained))
    return sum(abs(all_of[name] / len(groups) - of_trained[name] / len(trained)) for name in all_of) / 2
