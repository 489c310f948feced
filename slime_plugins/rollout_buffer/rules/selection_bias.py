"""Pure: selection bias, the difference between the distributions of trained and of submitted members.

Two one-sided Mann-Whitney tests, by the normal approximation with ties. They assume nothing about the distribution of
durations, whose tails are heavy.

* Did groups that were lost for other reasons than their rewards take longer than trained groups?
* Did missing members play for longer than their siblings? The test is stratified by group.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from slime_plugins.rollout_buffer.rules.trajectory_stats import mean_of_known

MIN_MEMBERS = 16
"""Minimum number of members, or of groups for a test over groups."""
MIN_LOST = 5
"""Minimum number of lost groups, or of missing members."""
SIGNIFICANT = 0.01
MAX_MISSING_SHARE = 0.1
"""A larger share of missing members is reported even if the test is not significant."""
QUARTERS = ("fastest quarter", "second", "third", "slowest quarter")
LENGTHS = ("shortest quarter", "second", "third", "longest quarter")
TURNS = ("fewest turns", "second", "third", "most turns")
REWARDS = ("lowest quarter", "second", "third", "highest quarter")
SOLVED = ("not solved", "partly solved", "solved")
NEVER_CAME = "did not come"
MAX_TASKS = 8


class GroupOutcome(Enum):
    """The outcome of a closed group."""

    TRAINED = "trained"
    FILTERED = "filtered"  # by its rewards
    LOST = "lost"  # too old, timed out, or too few members


class MemberOutcome(Enum):
    """The outcome of a member of a closed group."""

    TRAINED = "trained"
    FILTERED = "filtered"  # by its reward, or with its group
    LOST = "lost"  # with its group
    GIVEN_UP = "given up"  # its group was closed while it played, or before it was written
    FAILED = "failed"  # its slot used up its attempts


MISSING = (MemberOutcome.GIVEN_UP, MemberOutcome.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedMember:
    """One of the n members of a closed group; None is unknown. The reward of a missing member is known
    only if its trajectory was written late.

    ``seconds`` is the duration of its successful attempt; without one, of its longest attempt. ``dummy`` is true if a
    dummy replaces it in the trained group.
    """

    outcome: MemberOutcome
    seconds: float | None = None
    length: int | None = None
    """In sampled tokens."""
    turns: int | None = None
    reward: float | None = None
    success: float | None = None
    task: str = ""
    dummy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """A closed group. ``seconds`` is the time from its first attempt to its verdict."""

    outcome: GroupOutcome
    seconds: float
    members: Sequence[FinishedMember] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasRow:
    """Submitted members of one category by outcome; the members that no field counts were lost."""

    by: str
    """`duration`, `length` (sampled tokens), `turns`, `reward`, `success` or `task`."""
    name: str
    """The category's name, such as `slowest quarter`."""
    submitted: int
    """Members of closed groups."""
    trained: int
    """Those that were delivered."""
    filtered: int
    """Those that were filtered for their rewards, or their group's."""
    given_up: int
    """Those without a trajectory when their group was closed."""
    failed: int
    """Those whose slot used up its attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLoss:
    """Slow groups are lost significantly more often."""

    lost: int
    trained_share_of_slowest: float
    trained_share: float
    p_value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingMembers:
    """Missing members. ``p_value`` belongs to the hypothesis that they played no longer than their siblings."""

    submitted: int
    trained: int
    given_up: int
    failed: int
    dummies: int
    seconds: float | None
    seconds_of_trained: float | None
    reward_of_trained: float | None
    reward_of_known: float | None
    p_value: float

    @property
    def are_slow(self) -> bool:
        """True if the missing members are significantly slower."""
        return self.p_value < SIGNIFICANT


NameOf = Callable[[FinishedMember], str | None]


def bias_table(groups: Sequence[FinishedGroup]) -> list[BiasRow]:
    """Returns rows by duration, length, turns, reward and success, and for the tasks that are trained least.

    Empty with fewer than ``MIN_MEMBERS`` members.
    """
    members = _members(groups)
    if len(members) < MIN_MEMBERS:
        return []
    kinds = _kinds(members)
    tasks = _rows("task", members, kinds["task"], sorted({member.task for member in members}))
    tasks.sort(key=lambda row: row.trained / row.submitted)
    return [
        *_rows("duration", members, kinds["duration"], (*QUARTERS, NEVER_CAME)),
        *_rows("length", members, kinds["length"], (*LENGTHS, NEVER_CAME)),
        *_rows("turns", members, kinds["turns"], (*TURNS, NEVER_CAME)),
        *_rows("reward", members, kinds["reward"], (*REWARDS, NEVER_CAME)),
        *_rows("success", members, kinds["success"], (*SOLVED, NEVER_CAME)),
        *tasks[:MAX_TASKS],
    ]


def bias_measures(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """Returns the total variation distance (0 to 1) between trained and submitted members, by property.

    ``slowest`` is the slowest quarter's share of the trained members over its share of the submitted. ``given_up``,
    ``failed`` and ``dummies`` are shares of the submitted members. ``reward_shift`` is the mean reward of the trained
    members minus that of all with a known reward. Empty with fewer than ``MIN_MEMBERS`` members, or none trained.
    """
    members = _members(groups)
    trained = [member for member in members if member.outcome is MemberOutcome.TRAINED]
    if len(members) < MIN_MEMBERS or not trained:
        return {}
    kinds = _kinds(members)
    measures = {name: _distance(members, trained, kind) for name, kind in kinds.items()}
    quarter = kinds["duration"]
    slow_trained, slow = (sum(quarter(one) == QUARTERS[-1] for one in some) / len(some) for some in (trained, members))
    if slow:
        measures["slowest"] = slow_trained / slow
    measures["given_up"], measures["failed"] = (_count(members, one) / len(members) for one in MISSING)
    measures["dummies"] = sum(member.dummy for member in members) / len(members)
    of_trained, of_known = (mean_of_known(member.reward for member in some) for some in (trained, members))
    if of_trained is not None and of_known is not None:
        measures["reward_shift"] = of_trained - of_known
    return measures


def missing_members(groups: Sequence[FinishedGroup]) -> MissingMembers | None:
    """Returns statistics of the missing members; None if they are few and not significantly slower."""
    members = _members(groups)
    missing = [member for member in members if member.outcome in MISSING]
    if len(members) < MIN_MEMBERS or len(missing) < MIN_LOST:
        return None
    trained = [member for member in members if member.outcome is MemberOutcome.TRAINED]
    found = MissingMembers(
        submitted=len(members),
        trained=len(trained),
        given_up=_count(members, MemberOutcome.GIVEN_UP),
        failed=_count(members, MemberOutcome.FAILED),
        dummies=sum(member.dummy for member in members),
        seconds=mean_of_known(member.seconds for member in missing),
        seconds_of_trained=mean_of_known(member.seconds for member in trained),
        reward_of_trained=mean_of_known(member.reward for member in trained),
        reward_of_known=mean_of_known(member.reward for member in members),
        p_value=larger_p_value([_missing_and_others(group) for group in groups]),
    )
    return found if found.are_slow or len(missing) >= MAX_MISSING_SHARE * len(members) else None


def slow_loss(groups: Sequence[FinishedGroup]) -> SlowLoss | None:
    """Returns statistics of lost groups if they took longer than trained groups (significance level 1 %); else None."""
    lost = [group.seconds for group in groups if group.outcome is GroupOutcome.LOST]
    trained = [group.seconds for group in groups if group.outcome is GroupOutcome.TRAINED]
    if len(lost) < MIN_LOST or len(lost) + len(trained) < MIN_MEMBERS or not trained:
        return None
    p_value = larger_p_value([(lost, trained)])
    if p_value >= SIGNIFICANT:
        return None
    edge = sorted(lost + trained)[3 * (len(lost) + len(trained)) // 4]
    slow_trained, slow_lost = (sum(seconds >= edge for seconds in some) for some in (trained, lost))
    return SlowLoss(
        lost=len(lost),
        trained_share_of_slowest=slow_trained / (slow_trained + slow_lost),
        trained_share=len(trained) / (len(lost) + len(trained)),
        p_value=p_value,
    )


def larger_p_value(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Returns the p-value of a one-sided test whether the first values of each pair are larger; 1 if all are equal."""
    above, variance = 0.0, 0.0
    for these, those in strata:
        n, m = len(these), len(those)
        if not n or not m:
            continue
        both = sorted([*these, *those])
        # Equal values share the mean of their ranks.
        ranks = math.fsum((bisect.bisect_left(both, one) + bisect.bisect_right(both, one) + 1) / 2 for one in these)
        above += ranks - n * (n + 1) / 2 - n * m / 2
        ties = math.fsum(count**3 - count for count in Counter(both).values())
        variance += n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 1.0
    # 0.5 is the continuity correction.
    return 0.5 * math.erfc((above - 0.5) / math.sqrt(2 * variance))


def _missing_and_others(group: FinishedGroup) -> tuple[list[float], list[float]]:
    """Returns the durations, in seconds, of the missing members of a group, and of the others."""
    known = [(member.outcome in MISSING, member.seconds) for member in group.members if member.seconds is not None]
    return [seconds for is_missing, seconds in known if is_missing], [s for is_missing, s in known if not is_missing]


def _members(groups: Sequence[FinishedGroup]) -> list[FinishedMember]:
    return [member for group in groups for member in group.members]


def _count(members: Sequence[FinishedMember], outcome: MemberOutcome) -> int:
    return sum(member.outcome is outcome for member in members)


def _kinds(members: Sequence[FinishedMember]) -> dict[str, NameOf]:
    """Returns the functions that name a member's category, by property."""
    return {
        "duration": _quarter(members, QUARTERS, lambda member: member.seconds),
        "length": _quarter(members, LENGTHS, lambda member: member.length),
        "turns": _quarter(members, TURNS, lambda member: member.turns),
        "reward": _quarter(members, REWARDS, lambda member: member.reward),
        "success": _success,
        "task": lambda member: member.task,
    }


def _quarter(
    members: Sequence[FinishedMember], names: Sequence[str], value_of: Callable[[FinishedMember], float | None]
) -> NameOf:
    """Returns a function that names a member's quarter; equal values share the quarter of their mean rank."""
    values = sorted(value for member in members if (value := value_of(member)) is not None)

    def name(member: FinishedMember) -> str | None:
        if (value := value_of(member)) is None:
            return _name_without_value(member)
        below, not_above = bisect.bisect_left(values, value), bisect.bisect_right(values, value)
        return names[2 * (below + not_above) // len(values)]

    return name


def _success(member: FinishedMember) -> str | None:
    if member.success is None:
        return _name_without_value(member)
    if member.success <= 0:
        return SOLVED[0]
    return SOLVED[2] if member.success >= 1 else SOLVED[1]


def _name_without_value(member: FinishedMember) -> str | None:
    return NEVER_CAME if member.outcome in MISSING else None


def _rows(by: str, members: Sequence[FinishedMember], name_of: NameOf, names: Sequence[str]) -> list[BiasRow]:
    counted = Counter((name_of(member), member.outcome) for member in members)
    rows = [
        BiasRow(
            by=by,
            name=name,
            submitted=sum(counted[name, outcome] for outcome in MemberOutcome),
            trained=counted[name, MemberOutcome.TRAINED],
            filtered=counted[name, MemberOutcome.FILTERED],
            given_up=counted[name, MemberOutcome.GIVEN_UP],
            failed=counted[name, MemberOutcome.FAILED],
        )
        for name in names
    ]
    rows = [row for row in rows if row.submitted]
    return [] if [row.name for row in rows] == [NEVER_CAME] else rows


def _distance(members: Sequence[FinishedMember], trained: Sequence[FinishedMember], name_of: NameOf) -> float:
    counts, trained_counts = Counter(map(name_of, members)), Counter(map(name_of, trained))
    return sum(abs(counts[name] / len(members) - trained_counts[name] / len(trained)) for name in counts) / 2
