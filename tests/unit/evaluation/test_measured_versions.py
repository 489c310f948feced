"""Which weights an episode of an evaluation was sampled by: its turns are read only where the weights had moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime.rollout import agent_rollout_eval
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.evaluation import evaluate


class Stored:
    """A client with one trajectory of two turns, sampled by versions 3 and 4."""

    def __init__(self) -> None:
        self.reads = 0

    def trajectory(self, uid: str, *, job_id: str) -> dict[str, Any]:
        self.reads += 1
        turns = [{"prompt_ids": [1], "output_ids": [2], "weight_version": version} for version in ("3", "4")]
        return {"uid": uid, "generations": turns}


@pytest.mark.parametrize(
    ("oldest", "behind", "versions", "reads"),
    [(None, None, None, 0), (3, 0, (3, 3), 0), (3, 2, (3, 4), 1), (3, None, (3, 4), 1)],
)
def test_turns_are_read_where_the_weights_had_moved(
    oldest: int | None, behind: int | None, versions: tuple[int, int] | None, reads: int
) -> None:
    stored = Stored()
    entry = {"uid": "u", "oldest_version": oldest, "versions_behind": behind}
    assert evaluate._versions(cast("RolloutBufferClient", stored), "j", entry) == versions
    assert stored.reads == reads


def test_in_a_training_the_versions_of_a_set_are_counted() -> None:
    def trajectory(*versions: str) -> list[Any]:
        return [SimpleNamespace(weight_versions=list(versions))]

    counted = agent_rollout_eval._weight_versions("set", [trajectory("3"), trajectory("3", "4"), trajectory()])
    assert counted == {"eval/set-weight_versions": 2, "eval/set-spanning_a_change": 1}
    assert agent_rollout_eval._weight_versions("set", [trajectory()]) == {}
