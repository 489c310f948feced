"""Trajectories of unequal length: one baseline per group of trajectories, one weight per trajectory.

The numbers of the worked example stand in ``docs/android_world.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import check_batch, flat_samples, trainer_args
from slime.rollout.agent_rollout import post_process_rewards
from slime.rollout.agent_rollout_samples import Group, SampleConverter, finish_batch
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.unit.generator.gui_agent.test_history import DONE, click, play_history

N, GROUPS = 2, 2
EXAMPLE = [("A", 0.9, 2), ("A", 0.0, 6), ("B", 0.5, 1), ("B", 0.1, 3)]
"""Task, reward and rows of four trajectories."""


def item(trajectory: Trajectory, *, group: int, slot: int, reward: float) -> RolloutItem:
    return RolloutItem(
        uid=f"{group}/{slot}",
        instance_id=str(group),
        group_index=group,
        slot=slot,
        messages=trajectory.messages,
        reward=reward,
        generations=trajectory.generations,
        extra_info=trajectory.extra_info,
    )


async def batch_of(trajectories: Sequence[tuple[str, float, int]]) -> list[Group]:
    """Plays history episodes of as many turns as wanted and makes them a batch, as the trainer's side does."""
    items = []
    for slot, (task, reward, rows) in enumerate(trajectories):
        played = await play_history([*[click("on")] * (rows - 1), DONE])
        items.append(item(played.trajectory, group="AB".index(task), slot=slot % N, reward=reward))
    groups = SampleConverter(trainer_args(), samples_per_group=N).groups(items)
    return finish_batch(groups, rollout_id=0)


def slimes_default(rewards: Sequence[float]) -> list[float]:
    """slime's own normalisation without the division by the standard deviation: groups are stretches of the list."""
    size = N if len(rewards) == N * GROUPS else len(rewards)
    return centred(rewards, size)


def centred(rewards: Sequence[float], size: int) -> list[float]:
    """Subtracts the mean of each stretch of ``size`` rewards."""
    stretches = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return [reward - math.fsum(stretch) / len(stretch) for stretch in stretches for reward in stretch]


def loss_weights(samples: Sequence[Sample]) -> dict[str, float]:
    """What each trajectory weighs in slime's loss: its rows' masked means over the sum of all masks of its rollout."""
    masks: dict[object, int] = {}
    ids = [sample.rollout_id if sample.rollout_id is not None else ("row", at) for at, sample in enumerate(samples)]
    for key, sample in zip(ids, samples, strict=True):
        masks[key] = masks.get(key, 0) + sum(sample.loss_mask or [])
    weights: dict[str, float] = {}
    for key, sample in zip(ids, samples, strict=True):
        uid = str(sample.prompt)
        weights[uid] = weights.get(uid, 0.0) + sum(sample.loss_mask or []) / masks[key]
    return weights


def per_trajectory(samples: Sequence[Sample], values: Sequence[float]) -> list[float]:
    """The value of each trajectory; all its rows must have the same."""
    found: dict[str, set[float]] = {}
    for sample, value in zip(samples, values, strict=True):
        found.setdefault(str(sample.prompt), set()).add(round(value, 4))
    assert all(len(values) == 1 for values in found.values())
    return [values.pop() for values in found.values()]


def table_of_the_docs() -> list[tuple[str, ...]]:
    """Reward, rows and the three advantages of each trajectory, as the docs have them."""
    text = (Path(__file__).resolve().parents[4] / "docs" / "android_world.md").read_text(encoding="utf-8")
    lines = [line.replace("−", "-") for line in text.splitlines() if line.startswith("| task ")]
    return [tuple(cell.strip() for cell in line.split("|")[2:-1]) for line in lines]


async def test_the_worked_example_of_the_docs() -> None:
    args = trainer_args(n_samples_per_prompt=N, rollout_batch_size=GROUPS, grpo_std_normalization=False)
    batch = await batch_of(EXAMPLE)
    check_batch(args, batch)
    samples = flat_samples(batch)
    assert [len(member) for group in batch for member in group] == [2, 6, 1, 3]
    raw, ours = post_process_rewards(args, samples)
    assert per_trajectory(samples, ours) == [0.45, -0.45, 0.2, -0.2]
    assert per_trajectory(samples, slimes_default(raw)) == [0.6833, -0.2167, 0.2833, -0.1167]
    assert [round(value, 4) for value in centred(raw, N)] == [0.0] * 8 + [0.2, -0.2, 0.0, 0.0]
    assert [cells[:5] for cells in table_of_the_docs()] == [
        (f"{reward:g}" if reward else "0.0", str(count), f"{mine:g}", f"{default:g}", stretches)
        for (_, reward, count), mine, default, stretches in zip(
            EXAMPLE,
            [0.45, -0.45, 0.2, -0.2],
            [0.6833, -0.2167, 0.2833, -0.1167],
            ["0", "0", "0.2", "-0.2, 0, 0"],
            strict=True,
        )
    ]


async def test_every_trajectory_weighs_the_same_in_the_loss_whatever_its_length() -> None:
    samples = flat_samples(await batch_of(EXAMPLE))
    assert loss_weights(samples) == pytest.approx({"0/0": 1.0, "0/1": 1.0, "1/0": 1.0, "1/1": 1.0})


@given(st.lists(st.tuples(st.floats(-0.5, 1.1), st.integers(1, 9)), min_size=2, max_size=6))
def test_how_many_rows_a_trajectory_has_changes_no_advantage(members: list[tuple[float, int]]) -> None:
    def advantages(rows_of_each: Sequence[int]) -> list[float]:
        samples = [
            Sample(prompt=str(index), reward=reward, group_index=0, rollout_id=index)
            for index, ((reward, _), rows) in enumerate(zip(members, rows_of_each, strict=True))
            for _ in range(rows)
        ]
        return per_trajectory(samples, post_process_rewards(trainer_args(), samples)[1])

    assert advantages([rows for _, rows in members]) == advantages([1] * len(members))
