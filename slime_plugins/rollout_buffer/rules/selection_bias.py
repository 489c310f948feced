"""Pure: is what is trained what was submitted? By the members of the groups that are over.

Two tests, both of Mann and Whitney, one-sided, by the normal approximation with ties. They ask nothing of the
distribution of times, whose tails are heavy.

* Of groups that were lost, and not for their rewards: did they take longer than the trained ones?
* Of members that never came: had they played for longer than their siblings that did? Within each group, so that groups
  whose members are alike say nothing by their number.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

MIN_MEMBERS = 16
"""Of fewer members, or groups where groups are compared, nothing is said."""
MIN_LOST = 5
SIGNIFICANT = 0.01
MUCH = 0.1
"""A share of members that is missing, and worth saying also where nothing tells which ones they are."""
QUARTERS = ("fastest quarter", "second", "third", "slowest quarter")
LENGTHS = ("shortest quarter", "second", "third", "longest quarter")
TURNS = ("fewest turns", "second", "third", "most turns")
REWARDS = ("lowest quarter", "second", "third", "highest quarter")
SOLVED = ("not solved", "partly solved", "solved")
NEVER_CAME = "did not come"
MAX_TASKS = 8


class GroupOutcome(Enum):
    """What became of a group that is over."""

    TRAINED = "trained"
    FILTERED = "filtered"  # for its rewards: it would have taught nothing
    LOST = "lost"  # too old, timed out, or too few of its members could be played


class MemberOutcome(Enum):
    """What became of a member of a group that is over."""

    TRAINED = "trained"
    FILTERED = "filtered"  # for its reward, or its group's
    LOST = "lost"  # with its group
    GIVEN_UP = "given up"  # its group was closed while it played, or before anybody wrote it
    FAILED = "failed"  # its slot used up its attempts


MISSING = (MemberOutcome.GIVEN_UP, MemberOutcome.FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedMember:
    """One of the n of a group that is over; None is what no one knows. One that never came has no reward.

    ``seconds`` are those of the attempt that brought it, or else of its longest. ``dummy`` is true when a dummy stands
    for it in what is trained.
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
    """A group that is over. ``seconds`` are from its first attempt to its verdict."""

    outcome: GroupOutcome
    seconds: float
    members: Sequence[FinishedMember] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasRow:
    """How many members of one kind are over, and what became of them; those that nothing else counts were lost."""

    by: str
    """`duration`, `length` (sampled tokens), `turns`, `reward`, `success` or `task`."""
    name: str
    """Which of that kind."""
    submitted: int
    """Members of groups that are over."""
    trained: int
    """Those that were handed out."""
    filtered: int
    """Those that were filtered for their rewards, or their group's."""
    given_up: int
    """Those that had not come when their group was closed."""
    failed: int
    """Those whose slot used up its attempts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLoss:
    """Slow groups are lost more often than chance explains."""

    lost: int
    trained_share_of_slowest: float
    trained_share: float
    p_value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingMembers:
    """Members that never came, or too late. ``p_value`` is of their having played no longer than their siblings."""

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
        """Whether those that are missing are the slow ones, by more than chance."""
        return self.p_value < SIGNIFICANT


NameOf = Callable[[FinishedMember], str | None]


def bias_table(groups: Sequence[FinishedGroup]) -> list[BiasRow]:
    """Returns the rows of all kinds: by duration, length, turns, reward and success, and the tasks that differ most.

    Empty while too few members are over.
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
    """Returns the total variation between trained and submitted members, by kind; {} while too few are over or trained.

    0 is none, 1 all. ``slowest`` is the slowest quarter's share of the trained members over its share of the submitted.
    ``given_up``, ``failed`` and ``dummies`` are shares of the submitted ones, ``reward_shift`` is the mean reward of
    the trained ones less that of all of which it is known.
    """
    members = _members(groups)
    trained = [member for member in members if member.outcome is MemberOutcome.TRAINED]
    if len(members) < MIN_MEMBERS or not trained:
        return {}
    kinds = _kinds(members)
    measures = {name: _distance(members, trained, kind) for name, kind in kinds.items()}
    is_slow = kinds["duration"]
    slowest = [sum(is_slow(one) == QUARTERS[-1] for one in these) / len(these) for these in (trained, members)]
    if slowest[1]:
        measures["slowest"] = slowest[0] / slowest[1]
    measures["given_up"], measures["failed"] = (_count(members, one) / len(members) for one in MISSING)
    measures["dummies"] = sum(member.dummy for member in members) / len(members)
    of_trained, of_known = _mean_reward(trained), _mean_reward(members)
    if of_trained is not None and of_known is not None:
        measures["reward_shift"] = of_trained - of_known
    return measures


def missing_members(groups: Sequence[FinishedGroup]) -> MissingMembers | None:
    """Returns what is to be said of the members that are missing; None where those are few, and not the slow ones."""
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
        seconds=_mean_seconds(missing),
        seconds_of_trained=_mean_seconds(trained),
        reward_of_trained=_mean_reward(trained),
        reward_of_known=_mean_reward(members),
        p_value=larger_p_value([_missing_and_others(group) for group in groups]),
    )
    return found if found.are_slow or len(missing) >= MUCH * len(members) else None


def slow_loss(groups: Sequence[FinishedGroup]) -> SlowLoss | None:
    """Returns what says that slow groups are lost more often, where a test at the level of 1 % says so; else None."""
    lost = [group.seconds for group in groups if group.outcome is GroupOutcome.LOST]
    trained = [group.seconds for group in groups if group.outcome is GroupOutcome.TRAINED]
    if len(lost) < MIN_LOST or len(lost) + len(trained) < MIN_MEMBERS or not trained:
        return None
    p_value = larger_p_value([(lost, trained)])
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


def larger_p_value(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Returns the one-sided p-value that in each pair the first are larger than the second; 1 where all are equal."""
    above, variance = 0.0, 0.0
    for these, those in strata:
        n, m = len(these), len(those)
        if not n or not m:
            continue
        both = sorted([*these, *those])
        ranks = math.fsum((bisect.bisect_left(both, one) + bisect.bisect_right(both, one) + 1) / 2 for one in these)
        above += ranks - n * (n + 1) / 2 - n * m / 2
        ties = math.fsum(count**3 - count for count in Counter(both).values())
        variance += n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 1.0
    return 0.5 * math.erfc((above - 0.5) / math.sqrt(2 * variance))


def _missing_and_others(group: FinishedGroup) -> tuple[list[float], list[float]]:
    """How long the members of a group played that never came, and those that did."""
    known = [(member.outcome in MISSING, member.seconds) for member in group.members if member.seconds is not None]
    return [seconds for is_missing, seconds in known if is_missing], [s for is_missing, s in known if not is_missing]


def _members(groups: Sequence[FinishedGroup]) -> list[FinishedMember]:
    return [member for group in groups for member in group.members]


def _count(members: Sequence[FinishedMember], outcome: MemberOutcome) -> int:
    return sum(member.outcome is outcome for member in members)


def _mean_seconds(members: Sequence[FinishedMember]) -> float | None:
    known = [member.seconds for member in members if member.seconds is not None]
    return fmean(known) if known else None


def _mean_reward(members: Sequence[FinishedMember]) -> float | None:
    known = [member.reward for member in members if member.reward is not None]
    return fmean(known) if known else None


def _kinds(members: Sequence[FinishedMember]) -> dict[str, NameOf]:
    """What names the kind of a member, by what is looked at."""
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
    """Returns what names the quarter of a member; equal values share one."""
    values = sorted(value for member in members if (value := value_of(member)) is not None)
    edges = [values[len(values) * quarter // 4] for quarter in (1, 2, 3)] if values else []

    def name(member: FinishedMember) -> str | None:
        value = value_of(member)
        return _unknown(member) if value is None else names[bisect.bisect_right(edges, value)]

    return name


def _success(member: FinishedMember) -> str | None:
    if member.success is None:
        return _unknown(member)
    return SOLVED[0] if member.success <= 0 else SOLVED[2] if member.success >= 1 else SOLVED[1]


def _unknown(member: FinishedMember) -> str | None:
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
    found = [row for row in rows if row.submitted]
    return [] if [row.name for row in found] == [NEVER_CAME] else found


def _distance(members: Sequence[FinishedMember], trained: Sequence[FinishedMember], name_of: NameOf) -> float:
    all_of, of_trained = Counter(map(name_of, members)), Counter(map(name_of, trained))
    return sum(abs(all_of[name] / len(members) - of_trained[name] / len(trained)) for name in all_of) / 2
