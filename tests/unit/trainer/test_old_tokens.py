"""Tokens of weights that are too old are masked one by one; what is left is trained, and nothing left is a dummy."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import check_batch, trainer_args
from slime.rollout.agent_rollout_samples import finish_batch, rows_of, samples_of_group
from slime.rollout.agent_rollout_settings import read_row_settings
from slime.utils.mask_utils import Generation, WeightVersionSpan
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.wire import RolloutItem

RESUMED = (
    Generation([1, 2], [10, 11], [-0.5, -0.5], weight_version="3"),
    Generation(
        [1, 2, 10, 11, 4],
        [12, 13, 14],
        [-1.0, -1.0, -1.0],
        weight_version="5",
        weight_version_spans=(WeightVersionSpan("4", 0, 1), WeightVersionSpan("5", 1, 3)),
    ),
)


def arguments(**changes: Any) -> Any:
    return trainer_args(hf_checkpoint=str(DEMO_TOKENIZER_PATH), n_samples_per_prompt=2, rollout_batch_size=1, **changes)


def batch_of(*turns: tuple[Generation, ...], trainer_version: int | None, **changes: Any) -> tuple[list[Any], Any]:
    args = arguments(**changes)
    builder = RowBuilder(read_row_settings(args, len(turns)))
    items = [
        RolloutItem(uid=f"u{slot}", instance_id="task", reward=float(slot), generations=own, group_index=0, slot=slot)
        for slot, own in enumerate(turns)
    ]
    (group,) = builder.groups(items, trainer_version=trainer_version)
    batch = finish_batch([samples_of_group(group)], 0, args)
    check_batch(args, batch)
    return batch, builder.counts


def flat(batch: list[Any]) -> list[Sample]:
    return [row for group in batch for member in group for row in rows_of(member)]


def test_a_trajectory_of_which_nothing_is_left_is_a_dummy_that_is_counted_and_says_why() -> None:
    batch, counts = batch_of(RESUMED[:1], RESUMED, trainer_version=6, rollout_buffer_max_token_lag=2)
    dummy, other = flat(batch)

    assert (dummy.remove_sample, other.remove_sample) == (True, False)
    assert "more than 2 weight versions older than the trainer's version 6" in dummy.metadata["dummy_reason"]
    assert (counts["old_trajectories"], counts["dummies"]) == (1, 1)
    assert dummy.reward == other.reward


def test_where_the_trainers_version_is_not_known_nothing_is_too_old() -> None:
    batch, counts = batch_of(RESUMED, RESUMED, trainer_version=None, rollout_buffer_max_token_lag=0)

    assert sum(flat(batch)[0].loss_mask or ()) == 5
    assert counts["old_tokens"] == 0


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_lag_is_a_number_of_versions(value: Any) -> None:
    with pytest.raises(ConfigError, match="rollout_buffer_max_token_lag"):
        read_row_settings(arguments(rollout_buffer_max_token_lag=value), 2)
