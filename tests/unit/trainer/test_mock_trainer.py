"""The mock trainer refuses what slime would choke on."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import check_batch, trainer_args
from slime.utils.types import Sample


def sample(rollout_id: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "response_length": 2,
        "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0],
        "reward": 1.0,
        "metadata": {"uid": rollout_id},
    }
    return Sample(rollout_id=rollout_id, **{**values, **changes})


def check(*groups: list[Any]) -> None:
    check_batch(trainer_args(rollout_batch_size=len(groups), n_samples_per_prompt=2), groups)


@pytest.mark.parametrize(
    ("group", "rule"),
    [
        ([sample(0)], "1 trajectories, not"),
        ([sample(0), sample(0)], "share a rollout_id"),
        ([[sample(0), sample(1)], [sample(2)]], "different rollout_ids"),
        ([sample(0), sample(1, metadata={})], "different metadata keys"),
        ([sample(0), sample(1, rollout_log_probs=None)], "some have none"),
        ([sample(0), sample(1, rollout_log_probs=[0.0])], "log-probs are not as long"),
        ([sample(0), sample(1, loss_mask=[1])], "mask is not as long"),
        ([sample(0), sample(1, loss_mask=[0, 0])], "nothing is trained"),
        ([sample(0), sample(1, tokens=[1, 2])], "2 response tokens of 2"),
        ([sample(0), sample(1, reward=None)], "no reward"),
    ],
)
def test_a_wrong_batch_is_refused(group: list[Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check(group)
