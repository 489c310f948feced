"""Rewards are normalised per group of trajectories: neither rows nor dummies count."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout import post_process_rewards
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.rules.validity import MAX_REWARD


def sample(reward: float, *, group: int = 0, trajectory: int | None = None, dummy: bool = False) -> Sample:
    return Sample(reward=reward, group_index=group, rollout_id=trajectory, remove_sample=dummy)


def normalized(samples: list[Sample], **changes: Any) -> list[float]:
    return post_process_rewards(trainer_args(**changes), samples)[1]


def test_dummies_count_not_at_all() -> None:
    """Neither in the baseline nor, with larger rewards for the others, in slime's mean over the step."""
    members = [sample(1.0, trajectory=0), sample(0.0, trajectory=1), sample(9.0, trajectory=2, dummy=True)]

    assert normalized(members, grpo_std_normalization=False) == [0.75, -0.75, 0.0]
    assert math.fsum(map(abs, normalized(members, grpo_std_normalization=False))) / 3 == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rollout_data_postprocess_path": POSTPROCESS_PATH}, id="the training ranks correct the mean"),
        pytest.param({"calculate_per_token_loss": True}, id="the mean is over tokens"),
    ],
)
def test_rewards_are_not_scaled_where_slimes_mean_does_not_count_dummies(changes: dict[str, Any]) -> None:
    members = [sample(1.0, trajectory=0), sample(0.0, trajectory=1), sample(9.0, trajectory=2, dummy=True)]

    assert normalized(members, grpo_std_normalization=False, **changes) == [0.5, -0.5, 0.0]


def test_each_step_is_put_right_by_its_own_dummies() -> None:
    members = [
        *(sample(reward, group=0, trajectory=number) for number, reward in enumerate((1.0, 0.0))),
        *(sample(reward, group=1, trajectory=2 + number) for number, reward in enumerate((1.0, 0.0))),
        *(sample(0.0, group=1, trajectory=4 + number, dummy=True) for number in range(2)),
    ]

    rewards = normalized(members, grpo_std_normalization=False, global_batch_size=3)
    assert rewards == [0.5, -0.5, 0.5, -1.5, 0.0, 0.0]


def test_the_standard_deviation_is_the_one_slime_uses() -> None:
    rewards = [0.0, 0.25, 1.0, 0.5]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]

    assert normalized([sample(reward) for reward in rewards]) == pytest.approx(expected)


@pytest.mark.parametrize("changes", [{"rewards_normalization": False}, {"advantage_estimator": "ppo"}])
def test_slimes_own_switches_turn_normalization_off(changes: dict[str, Any]) -> None:
    assert normalized([sample(3.0), sample(1.0)], **changes) == [3.0, 1.0]


def test_reinforce_plus_plus_subtracts_the_baseline_and_divides_by_nothing() -> None:
    assert normalized([sample(3.0), sample(1.0)], advantage_estimator="reinforce_plus_plus_baseline") == [1.0, -1.0]


def test_a_reward_of_several_parts_is_read_by_its_key() -> None:
    members = [Sample(reward={"score": value, "other": 9.0}, group_index=0) for value in (0.0, 1.0)]

    assert normalized(members, reward_key="score", grpo_std_normalization=False) == [-0.5, 0.5]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(-100, 100), st.integers(1, 3), st.booleans()), min_size=1, max_size=12
    )
)
def test_every_group_sums_to_zero_over_its_trajectories(members: list[tuple[int, float, int, bool]]) -> None:
    samples = [
        sample(reward, group=group, trajectory=number, dummy=dummy)
        for number, (group, reward, rows, dummy) in enumerate(members)
        for _ in range(rows)
    ]
    rewards = normalized(samples)
    pairs = zip(samples, rewards, strict=True)
    by_trajectory = {entry.rollout_id: (entry.group_index, reward) for entry, reward in pairs}

    assert all(math.isfinite(reward) for reward in rewards)
    for group in range(3):
        total = math.fsum(reward for index, reward in by_trajectory.values() if index == group)
        assert total == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"])
def test_the_largest_rewards_add_up_over_the_tokens_of_a_step(estimator: str) -> None:
    """In 32 bits, where half of a step is dummies too."""
    members = [sample(MAX_REWARD * (-1) ** number, trajectory=number) for number in range(4)]
    dummies = [sample(0.0, trajectory=4 + number, dummy=True) for number in range(4)]

    rewards = normalized([*members, *dummies], advantage_estimator=estimator, grpo_std_normalization=False)
    assert np.isfinite(np.float32(1e8 * np.asarray(rewards))).all()
    assert [reward > 0 for reward in rewards[:4]] == [True, False, True, False]
