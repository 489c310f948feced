"""The five group functions, one group at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.generator.group_function_adapter import group_functions_of
from slime_plugins.rollout_buffer.rules.causes import Cause, CauseCode, Shortfall
from slime_plugins.rollout_buffer.rules.groups import (
    DEFAULT_FUNCTIONS,
    GroupPolicy,
    Member,
    judge_group,
    normalize_group_data,
    pad_group_data,
    summarize_rewards,
)
from slime_plugins.rollout_buffer.types import GroupState


def members_with(rewards: Sequence[float]) -> list[Member]:
    return [
        Member(uid=f"u{slot}", instance_id="i", slot=slot, reward=reward, source_uid=f"u{slot}")
        for slot, reward in enumerate(rewards)
    ]


def policy_of(size: int, **changes: Any) -> GroupPolicy:
    return replace(GroupPolicy(group_size=size, task_type="t"), **changes)


def test_a_full_group_with_mixed_rewards_is_ready_with_its_raw_rewards() -> None:
    verdict = judge_group(members_with([0, 1, 1, 0]), policy_of(4))
    assert verdict.state is GroupState.READY
    assert [member.reward for member in verdict.members] == [0, 1, 1, 0]
    assert [member.raw_reward for member in verdict.members] == [0, 1, 1, 0]


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_a_group_with_one_reward_is_filtered(reward: float) -> None:
    verdict = judge_group(members_with([reward] * 4), policy_of(4))
    assert verdict.state is GroupState.FILTERED
    assert verdict.cause.message == "all 4 members earned the same reward, so GRPO would learn nothing from them"


@pytest.mark.parametrize(("rewards", "note"), [([0.5, 0.5], " (all 2 members earned the same reward)"), ([0, 1], "")])
def test_a_group_that_the_generators_own_function_refused_says_so(rewards: list[float], note: str) -> None:
    own = replace(DEFAULT_FUNCTIONS, is_valid_group=lambda members, policy: False)
    verdict = judge_group(members_with(rewards), policy_of(2), own)
    assert verdict.state is GroupState.FILTERED
    assert verdict.cause.code is CauseCode.NOT_VALID
    assert verdict.cause.message == f"the generator's own is_valid_group refused it{note}"


def test_a_group_of_which_the_generators_own_filter_left_too_few_says_so() -> None:
    own = replace(DEFAULT_FUNCTIONS, filter_item=lambda member, policy: False)
    verdict = judge_group(members_with([0, 1]), policy_of(2), own)
    assert verdict.cause == Cause(CauseCode.ITEMS_FILTERED, "the generator's own filter_item kept 0 of 2 members")


def test_one_reward_is_fine_for_evaluation_and_for_groups_of_one() -> None:
    assert judge_group(members_with([1.0, 1.0]), policy_of(2, evaluation=True)).state is GroupState.READY
    assert judge_group(members_with([1.0]), policy_of(1)).state is GroupState.READY


def test_a_group_without_a_reward_in_the_policys_range_is_filtered_and_the_bounds_are_in_it() -> None:
    rewards = [-0.5, 1.6]
    verdict = judge_group(members_with(rewards), policy_of(2, reward_range=(0.0, 1.0)))
    assert verdict.state is GroupState.FILTERED
    assert verdict.cause.message == "filter_item kept 0 of 2 members (the other rewards lie outside of 0 to 1)"
    within = judge_group(members_with(rewards), policy_of(2, reward_range=(-0.5, 1.6)))
    assert [member.remove_sample for member in within.members] == [False, False]


def test_every_finite_reward_is_valid_unless_a_range_is_set() -> None:
    rewards = [-1.0, 1e9]
    assert judge_group(members_with(rewards), policy_of(2)).state is GroupState.READY
    verdict = judge_group(members_with([math.nan, math.inf]), policy_of(2))
    assert verdict.state is GroupState.FILTERED
    assert verdict.cause.message.endswith("(the other rewards are no finite numbers)")


def test_a_filtered_member_is_replaced_by_a_dummy_that_is_never_trained() -> None:
    verdict = judge_group(members_with([0.0, 1.0, 0.5, math.nan]), policy_of(4))
    assert verdict.state is GroupState.READY
    assert [member.remove_sample for member in verdict.members] == [False, False, False, True]
    assert verdict.members[-1].reward is None
    assert len({member.uid for member in verdict.members}) == 4


def test_a_short_group_is_delivered_from_the_timeout_ratio_on_and_failed_below_it() -> None:
    policy = policy_of(10, min_timeout_group_size_ratio=0.7)
    assert judge_group(members_with([0.5] * 7), policy, shortfall=Shortfall.TIMED_OUT).state is GroupState.READY
    failed = judge_group(members_with([0.5] * 6), policy, shortfall=Shortfall.TIMED_OUT)
    assert failed.state is GroupState.FAILED
    assert failed.cause.message == "timed out (6 of 10 members came within group_timeout_seconds)"
    assert judge_group([], policy).state is GroupState.FAILED
    half = policy_of(4, min_timeout_group_size_ratio=0.7)
    assert judge_group(members_with([0.0, 1.0]), half, shortfall=Shortfall.TIMED_OUT).state is GroupState.FAILED
    assert judge_group(members_with([0.0, 1.0, 1.0]), half, shortfall=Shortfall.TIMED_OUT).state is GroupState.READY


def test_copies_keep_the_sum_of_a_scaled_group() -> None:
    padded = pad_group_data(members_with([0.2, 0.4, 0.6]), policy_of(4, padding="copy"))
    assert len(padded) == 4
    assert math.fsum(member.reward or 0 for member in padded) == pytest.approx(1.2 * 4 / 3)
    assert padded[3].source_uid == padded[0].source_uid == "u0"
    assert padded[3].uid != padded[0].uid


def test_copies_never_weigh_one_trajectory_thrice() -> None:
    padded = pad_group_data(members_with([0.2]), policy_of(4, padding="copy"))
    assert [member.remove_sample for member in padded] == [False, False, True, True]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=16))
def test_normalised_rewards_sum_to_zero_and_keep_what_was_earned(rewards: list[float]) -> None:
    policy = policy_of(max(2, len(rewards)), normalize_rewards=True)
    normalized = normalize_group_data(members_with(rewards), policy)
    assert math.fsum(member.reward or 0 for member in normalized) == pytest.approx(0, abs=1e-5)
    assert [member.raw_reward for member in normalized] == rewards
    if len(set(rewards)) == 1:
        assert all(member.reward == 0 for member in normalized)


@given(
    st.lists(st.floats(0, 1), max_size=12),
    st.integers(1, 12),
    st.sampled_from(["dummy", "copy"]),
    st.sampled_from(Shortfall),
)
def test_a_ready_group_has_exactly_n_members_with_uids_of_their_own(
    rewards: list[float], size: int, padding: str, shortfall: Shortfall
) -> None:
    verdict = judge_group(members_with(rewards[:size]), policy_of(size, padding=padding), shortfall=shortfall)
    if verdict.state is GroupState.READY:
        assert len({member.uid for member in verdict.members}) == size
    else:
        assert verdict.members == ()
        assert verdict.cause.message
        assert verdict.cause.code


@given(st.permutations(list(range(6))), st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_arrival_order_changes_no_reward(order: list[int], rewards: list[float]) -> None:
    policy = policy_of(6, normalize_rewards=True)
    members = members_with(rewards)
    straight = {member.uid: member.reward for member in judge_group(members, policy).members}
    shuffled = {member.uid: member.reward for member in judge_group([members[i] for i in order], policy).members}
    assert shuffled == pytest.approx(straight)


def test_a_function_that_raises_fails_the_group_and_says_which() -> None:
    def explode(*_: Any) -> bool:
        raise ZeroDivisionError("half of a pair: \ud800")

    verdict = judge_group(members_with([0, 1]), policy_of(2), replace(DEFAULT_FUNCTIONS, filter_item=explode))
    assert verdict.state is GroupState.FAILED
    assert verdict.cause.message == "filter_item raised ZeroDivisionError: half of a pair: ?"


def test_a_reward_from_a_generators_function_that_is_no_number_fails_the_group() -> None:
    for reward in ({"reward": None}, {"raw_reward": "much"}):
        module = ModuleType("plugin")
        module.normalize_group_data = lambda group, own=reward: (group[0], [{**one, **own} for one in group[1]])  # type: ignore[attr-defined]  # a plugin is any module
        verdict = judge_group(members_with([0, 1]), policy_of(2), group_functions_of(module))
        assert verdict.cause.message.startswith("normalize_group_data raised ValueError: must be a number")


def test_slimes_signatures_are_understood() -> None:
    module = ModuleType("plugin")
    module.is_valid_group = lambda group, minimum, task_type: (len(group[1]) >= minimum, True)  # type: ignore[attr-defined]  # a plugin is any module
    module.filter_item = lambda item, task_type: item["extra_info"]["good"]  # type: ignore[attr-defined]  # as above
    module.pad_group_data = lambda group, size: (group[0], group[1] * size)  # type: ignore[attr-defined]  # as above
    functions = group_functions_of(module)
    members = [replace(member, item={"extra_info": {"good": member.slot == 0}}) for member in members_with([1.0, 1.0])]
    verdict = judge_group(members, policy_of(2, min_valid_item_size_ratio=0.5), functions)
    assert functions.needs_items
    assert [(member.uid, member.source_uid) for member in verdict.members] == [("u0", "u0"), ("u0+copy1", "u0")]


@given(st.lists(st.floats(-2, 2), min_size=0, max_size=30))
def test_statistics_from_sums_are_those_of_the_list(rewards: list[float]) -> None:
    summary = summarize_rewards(
        samples=len(rewards),
        groups=1,
        total=math.fsum(rewards),
        square_total=math.fsum(reward * reward for reward in rewards),
        low=min(rewards, default=None),
        high=max(rewards, default=None),
    )
    if len(rewards) > 1:
        assert summary["reward_std"] == pytest.approx(statistics.stdev(rewards), abs=1e-6)
    assert summary["total_samples"] == len(rewards)
