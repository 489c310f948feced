"""The reward table, number by number, and its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slime_plugins.rollout_buffer.generator.android_world.rewards import (
    PhoneRewardBreakdown,
    RewardSettings,
    thinking_bonus,
)
from slime_plugins.rollout_buffer.generator.android_world_generator import REWARD_RANGE

SETTINGS = RewardSettings()


def earned(
    success: float | None, thinking_tokens: list[int], max_turns: int = 10, *, ended_by_agent: bool = True
) -> PhoneRewardBreakdown:
    return SETTINGS.earned(
        score=success, ended_by_agent=ended_by_agent, thinking_tokens=thinking_tokens, max_turns=max_turns
    )


def test_a_success_is_scaled_by_its_steps_and_gets_the_bonus() -> None:
    breakdown = earned(1.0, [64, 64])
    assert breakdown.reward == pytest.approx(math.exp(-0.2) + 0.05)
    assert (breakdown.steps, breakdown.premature_penalty) == (2, 0.0)


def test_a_partial_success_is_scaled_and_gets_no_bonus_and_no_penalty() -> None:
    assert earned(0.5, [1000]).reward == pytest.approx(0.5 * math.exp(-0.1))


@pytest.mark.parametrize(("steps", "penalty"), [(0, 0.5), (1, 0.45), (5, 0.25), (10, 0.0)])
def test_giving_up_costs_more_the_earlier(steps: int, penalty: float) -> None:
    assert earned(0.0, [7] * steps).reward == pytest.approx(-penalty)


def test_an_episode_that_was_given_up_earns_nothing_and_says_that_it_was_not_scored() -> None:
    breakdown = earned(None, [64] * 3, ended_by_agent=False)
    assert breakdown.reward == 0.0
    assert breakdown.success is None


def test_the_bonus_is_half_at_its_middle_and_grows_with_thinking() -> None:
    assert thinking_bonus(64, SETTINGS) == pytest.approx(0.05)
    assert 0 <= thinking_bonus(0, SETTINGS) < 0.05 < thinking_bonus(4096, SETTINGS) <= 0.1


reward_settings = st.builds(
    RewardSettings,
    step_decay=st.floats(0, 10),
    step_scale_min=st.floats(0, 0.5),
    step_scale_max=st.floats(0.5, 1.5),
    thinking_bonus=st.floats(0, 0.5),
    thinking_tokens_middle=st.floats(0, 1e6),
    thinking_tokens_width=st.floats(1e-3, 1e6),
    premature_penalty=st.floats(0, 0.5),
)


@given(
    success=st.none() | st.floats(0, 1),
    ended_by_agent=st.booleans(),
    thinking=st.lists(st.integers(0, 100_000), max_size=60),
    max_turns=st.integers(1, 120),
    settings=reward_settings,
)
def test_every_reward_lies_in_the_range_that_the_generator_declares(
    success: float | None, ended_by_agent: bool, thinking: list[int], max_turns: int, settings: RewardSettings
) -> None:
    breakdown = settings.earned(
        score=success, ended_by_agent=ended_by_agent, thinking_tokens=thinking, max_turns=max_turns
    )
    assert REWARD_RANGE[0] <= breakdown.reward <= REWARD_RANGE[1]
    assert breakdown.as_dict()["reward"] == breakdown.reward


@pytest.mark.parametrize(
    "wrong",
    [
        {"premature_penalty": 0.6},
        {"thinking_bonus": 0.6},
        {"step_decay": -0.1},
        {"step_scale_min": 1, "step_scale_max": 0.5},
    ],
)
def test_constants_that_would_leave_the_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        RewardSettings.model_validate(wrong)
