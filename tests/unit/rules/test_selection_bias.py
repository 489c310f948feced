"""How the trained differ from the submitted: the table, the distances, the tests for slow groups and slow members."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.selection_bias import (
    FinishedGroup,
    FinishedMember,
    GroupOutcome,
    MemberOutcome,
    bias_measures,
    bias_table,
    larger_p_value,
    missing_members,
    slow_loss,
)

MEMBERS = st.builds(
    FinishedMember,
    outcome=st.sampled_from(MemberOutcome),
    seconds=st.none() | st.floats(0, 1e6),
    length=st.none() | st.integers(0, 10**6),
    turns=st.none() | st.integers(0, 100),
    reward=st.none() | st.floats(-10, 10),
    success=st.none() | st.floats(0, 1),
    task=st.sampled_from(["a", "b", "c"]),
)
GROUPS = st.lists(
    st.builds(
        FinishedGroup,
        outcome=st.sampled_from(GroupOutcome),
        seconds=st.floats(0, 1e6),
        members=st.lists(MEMBERS, min_size=4, max_size=4),
    ),
    min_size=4,
    max_size=15,
)
OUTCOMES = {
    GroupOutcome.TRAINED: MemberOutcome.TRAINED,
    GroupOutcome.FILTERED: MemberOutcome.FILTERED,
    GroupOutcome.LOST: MemberOutcome.LOST,
}


def group(seconds: float, of_group: GroupOutcome = GroupOutcome.TRAINED) -> FinishedGroup:
    """A group of one."""
    member = FinishedMember(outcome=OUTCOMES[of_group], seconds=seconds, turns=3, success=0.5, task="t")
    return FinishedGroup(outcome=of_group, seconds=seconds, members=(member,))


def dropping_from(limit_s: float, seed: int = 0) -> list[FinishedGroup]:
    rng = random.Random(seed)
    times = [rng.lognormvariate(0, 1) for _ in range(200)]
    return [group(seconds, GroupOutcome.LOST if seconds > limit_s else GroupOutcome.TRAINED) for seconds in times]


def with_missing(groups: int, is_missing: list[bool], rng: random.Random, *, alike: float) -> list[FinishedGroup]:
    """Groups whose members take about as long as one another; those that are missing are chosen by their place."""
    found = []
    for _ in range(groups):
        shared = rng.lognormvariate(0, alike)
        members = [
            FinishedMember(
                outcome=MemberOutcome.GIVEN_UP if missing else MemberOutcome.TRAINED,
                seconds=shared * rng.lognormvariate(0, 0.3),
                reward=None if missing else 0.8,
                dummy=missing,
            )
            for missing in is_missing
        ]
        found.append(FinishedGroup(outcome=GroupOutcome.TRAINED, seconds=shared, members=members))
    return found


@given(GROUPS)
def test_each_kind_counts_once_every_member_whose_value_is_known_or_that_never_came(
    groups: list[FinishedGroup],
) -> None:
    rows = bias_table(groups)
    members = [member for one in groups for member in one.members]
    for by, field in (("duration", "seconds"), ("length", "length"), ("turns", "turns"), ("reward", "reward"),
                      ("success", "success")):  # fmt: skip
        known = [one for one in members if getattr(one, field) is not None]
        never = [one for one in members if getattr(one, field) is None
                 and one.outcome in (MemberOutcome.GIVEN_UP, MemberOutcome.FAILED)]  # fmt: skip
        assert sum(row.submitted for row in rows if row.by == by) == (len(known) + len(never) if known else 0)
    assert sum(row.submitted for row in rows if row.by == "task") == len(members)
    assert all(0 <= row.trained + row.filtered + row.given_up + row.failed <= row.submitted for row in rows)


def test_a_loss_of_the_slowest_groups_is_measured_and_reported() -> None:
    groups = dropping_from(2.0)
    assert bias_measures(groups)["slowest"] < 0.3
    assert bias_measures(groups)["duration"] > 0.1
    loss = slow_loss(groups)
    assert loss is not None
    assert loss.p_value < 1e-6
    assert loss.trained_share_of_slowest < 0.2 < loss.trained_share


def of_rewards(rewards: list[float], *, trained_from: float) -> list[FinishedGroup]:
    """Groups of one that all took a second; those of lower rewards are filtered."""
    return [
        FinishedGroup(
            outcome=GroupOutcome.TRAINED if reward >= trained_from else GroupOutcome.FILTERED,
            seconds=1.0,
            members=[
                FinishedMember(
                    outcome=MemberOutcome.TRAINED if reward >= trained_from else MemberOutcome.FILTERED,
                    seconds=1.0,
                    reward=reward,
                )
            ],
        )
        for reward in rewards
    ]


def test_equal_values_are_in_no_extreme_quarter_and_other_values_are_apart_from_them() -> None:
    groups = of_rewards([0.0] * 16 + [1.0] * 4, trained_from=1.0)
    rows = {(row.by, row.name): (row.submitted, row.trained) for row in bias_table(groups)}
    assert rows["reward", "second"] == (16, 0)
    assert rows["reward", "highest quarter"] == (4, 4)
    assert rows["duration", "third"] == (20, 4)
    measures = bias_measures(groups)
    assert measures["reward"] == pytest.approx(0.8)
    assert measures["duration"] == 0
    assert "slowest" not in measures
    assert slow_loss(groups) is None


def test_members_that_never_came_count_in_the_distance_of_each_unknown_value() -> None:
    groups = with_missing(6, [False] * 6 + [True] * 2, random.Random(1), alike=1)
    measures = bias_measures(groups)
    assert (measures["reward"], measures["given_up"], measures["dummies"], measures["failed"]) == (0.25, 0.25, 0.25, 0)
    rows = {(row.by, row.name): row for row in bias_table(groups)}
    assert (rows["reward", "did not come"].submitted, rows["reward", "did not come"].given_up) == (12, 12)


def test_members_that_are_given_up_as_the_slowest_of_their_groups_are_said_to_be_slow() -> None:
    groups = []
    for one in with_missing(3, [False] * 8, random.Random(1), alike=1):
        by_time = sorted(one.members, key=lambda member: member.seconds or 0.0)
        lost = [FinishedMember(outcome=MemberOutcome.GIVEN_UP, seconds=member.seconds) for member in by_time[6:]]
        groups.append(FinishedGroup(outcome=one.outcome, seconds=one.seconds, members=[*by_time[:6], *lost]))
    found = missing_members(groups)
    assert found is not None
    assert found.are_slow
    assert (found.submitted, found.trained, found.given_up) == (24, 18, 6)


def test_members_that_are_missing_by_chance_are_not_said_to_be_slow_though_groups_are_alike() -> None:
    said = 0
    for seed in range(200):
        found = missing_members(with_missing(12, [True] + [False] * 3, random.Random(seed), alike=2))
        assert found is not None, "a quarter is missing, whoever they are"
        said += found.are_slow
    assert said <= 8, "at the level of 1 % about two of 200"


def test_a_few_members_that_are_missing_by_chance_are_not_reported() -> None:
    rng = random.Random(3)
    groups = [*with_missing(5, [True] + [False] * 7, rng, alike=1), *with_missing(20, [False] * 8, rng, alike=1)]
    assert missing_members(groups) is None


def test_losing_groups_of_any_length_is_no_bias_against_slow_ones() -> None:
    said = 0
    for seed in range(200):
        rng = random.Random(seed)
        times = [rng.paretovariate(1.2) for _ in range(100)]
        said += (
            slow_loss([group(s, GroupOutcome.LOST if rng.random() < 0.2 else GroupOutcome.TRAINED) for s in times])
            is not None
        )
    assert said <= 8, "at the level of 1 % about two of 200"


@pytest.mark.parametrize(("these", "those"), [([5, 6, 7, 8], [1, 2, 3, 4, 5, 6]), ([1, 2, 2, 9], [2, 3, 3, 4, 8])])
def test_the_p_value_is_close_to_that_of_all_orders(these: list[float], those: list[float]) -> None:
    """Exact, by every way to choose which of them are ``these``."""

    def u(chosen: tuple[float, ...], others: list[float]) -> float:
        return sum((a > b) + (a == b) / 2 for a in chosen for b in others)

    pooled = [*these, *those]
    found = u(tuple(these), those)
    splits = list(itertools.combinations(range(len(pooled)), len(these)))
    as_large = sum(
        u(tuple(pooled[i] for i in split), [pooled[i] for i in range(len(pooled)) if i not in split]) >= found
        for split in splits
    )
    assert larger_p_value([(these, those)]) == pytest.approx(as_large / len(splits), abs=0.03)
