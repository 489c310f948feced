"""Is what is trained what was submitted: the table, the distances and the test for slow tasks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.bias import (
    FinishedGroup,
    GroupOutcome,
    bias_measures,
    bias_table,
    larger_p_value,
    slow_loss,
)

GROUPS = st.lists(
    st.builds(
        FinishedGroup,
        fate=st.sampled_from(GroupOutcome),
        seconds=st.floats(0, 1e6),
        task=st.sampled_from(["a", "b", "c"]),
        turns=st.none() | st.floats(0, 100),
        success=st.none() | st.floats(0, 1),
    ),
    min_size=16,
    max_size=60,
)


def group(seconds: float, fate: GroupOutcome = GroupOutcome.TRAINED, task: str = "t") -> FinishedGroup:
    return FinishedGroup(fate=fate, seconds=seconds, task=task, turns=seconds, success=0.5)


def dropping_from(limit_s: float, seed: int = 0) -> list[FinishedGroup]:
    rng = random.Random(seed)
    times = [rng.lognormvariate(0, 1) for _ in range(200)]
    return [group(seconds, GroupOutcome.LOST if seconds > limit_s else GroupOutcome.TRAINED) for seconds in times]


@given(GROUPS)
def test_each_kind_counts_every_group_of_which_it_is_known_once(groups: list[FinishedGroup]) -> None:
    rows = bias_table(groups)
    for by, known in (
        ("duration", len(groups)),
        ("turns", sum(one.turns is not None for one in groups)),
        ("success", sum(one.success is not None for one in groups)),
        ("task", len(groups)),
    ):
        assert sum(row.submitted for row in rows if row.by == by) == known
    assert all(0 <= row.trained + row.filtered <= row.submitted for row in rows)


@given(GROUPS)
def test_distances_are_shares_and_none_where_everything_is_trained(groups: list[FinishedGroup]) -> None:
    measures = bias_measures(groups)
    assert all(0 <= value <= 1 + 1e-9 for name, value in measures.items() if name != "slowest")
    everything = [FinishedGroup(fate=GroupOutcome.TRAINED, seconds=one.seconds, task=one.task) for one in groups]
    assert bias_measures(everything)["duration"] == 0


def test_what_drops_the_slow_is_seen_and_said() -> None:
    groups = dropping_from(2.0)
    assert bias_measures(groups)["slowest"] < 0.3
    assert bias_measures(groups)["duration"] > 0.1
    loss = slow_loss(groups)
    assert loss is not None
    assert loss.p_value < 1e-6
    assert loss.trained_share_of_slowest < 0.2 < loss.trained_share


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


def test_groups_that_were_filtered_for_their_rewards_are_no_loss() -> None:
    groups = [group(seconds, GroupOutcome.FILTERED if seconds > 50 else GroupOutcome.TRAINED) for seconds in range(100)]
    assert slow_loss(groups) is None
    assert bias_measures(groups)["slowest"] == 0


def test_of_a_few_groups_nothing_is_said() -> None:
    few = [group(1.0)] * 15
    assert bias_table(few) == []
    assert bias_measures(few) == {}
    assert slow_loss([group(9.0, GroupOutcome.LOST)] * 4 + [group(1.0)] * 50) is None
    assert bias_measures([group(1.0, GroupOutcome.LOST)] * 20) == {}


def test_groups_of_one_length_make_no_test() -> None:
    assert larger_p_value([1.0] * 10, [1.0] * 20) == 1.0


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
    assert larger_p_value(these, those) == pytest.approx(as_large / len(splits), abs=0.03)
