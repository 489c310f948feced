"""Batches of every generator as they were recorded, and the odd ones that a training meets sooner or later. Pure.

A row is a line of JSON as ``record_batches`` writes it: a Sample's fields.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.rules.reward_normalization import token_returns
from slime_plugins.rollout_buffer.rules.validity import MAX_REWARD
from slime_plugins.rollout_buffer.trainer.token_alignment import laid_out

FOLDER = Path(__file__).resolve().parents[1] / "data" / "slime_batches"
GENERATORS = ("android_world_history", "android_world_incremental", "math", "remote_rollout", "statelm")

Row = dict[str, Any]


def recorded(name: str) -> list[Row]:
    """Returns the rows of a recorded batch: two groups of four trajectories."""
    return [json.loads(line) for line in gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).splitlines()]


def mixed_rewards(rows: Sequence[Row]) -> list[Row]:
    """Rewards that differ within every group, so that every trajectory has an advantage."""
    return with_rewards(rows, lambda number: float(2 ** (number % 4)))


def with_rewards(rows: Sequence[Row], reward_of: Callable[[int], float]) -> list[Row]:
    """Gives every row the reward of its trajectory's number."""
    rewards = [reward_of(row["rollout_id"]) for row in rows]
    return [
        {**row, "reward": reward, "metadata": {**row["metadata"], "raw_reward": reward}}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def with_dummies(rows: Sequence[Row], trajectories: Sequence[int]) -> list[Row]:
    """Returns the rows with these trajectories replaced by dummies, as ``agent_rollout`` makes them."""
    left = [row for row in rows if row["rollout_id"] not in trajectories]
    dummies = [_dummy(next(row for row in rows if row["rollout_id"] == number)) for number in trajectories]
    return sorted([*left, *dummies], key=lambda row: row["rollout_id"])


def with_turn_rewards(rows: Sequence[Row], earned: Callable[[int, int], float], discount: float) -> list[Row]:
    """Gives each turn of a batch a reward, as Samples of a buffer carry it: by the trajectory's number and the turn's.

    A turn is an unbroken stretch of trained tokens; those of a trajectory are counted over all its rows.
    """
    found = []
    for number in dict.fromkeys(row["rollout_id"] for row in rows):
        own = [row for row in rows if row["rollout_id"] == number]
        lengths = [length for row in own for length in turn_lengths(row)]
        rewards = [earned(number, turn) for turn in range(len(lengths))]
        returns = token_returns(rewards, None, lengths, discount)
        left = iter(returns)
        for row in own:
            of_row = [value for _ in turn_lengths(row) for value in next(left)]
            metadata = {
                **row["metadata"],
                "turn_returns": [tokens[0] for tokens in returns],
                "token_returns": laid_out(row["loss_mask"], of_row, 0.0),
            }
            found.append({**row, "metadata": metadata})
    return found


def turn_lengths(row: Row) -> list[int]:
    """Returns how many tokens each turn of a row has, in order."""
    return [len(list(run)) for trained, run in groupby(row["loss_mask"]) if trained]


def _dummy(row: Row) -> Row:
    empty = {"tokens": [0, 0], "response_length": 1, "loss_mask": [0], "rollout_log_probs": [0.0]}
    return {**row, **empty, "reward": 0.0, "remove_sample": True, "status": "aborted"}


def _messages_alone(rows: Sequence[Row]) -> list[Row]:
    return [{**row, "rollout_log_probs": None, "weight_versions": []} for row in rows]


def _some_messages_alone(rows: Sequence[Row]) -> list[Row]:
    """Five trajectories of eight have no log-probs."""
    without = {row["rollout_id"]: row for row in _messages_alone(rows)}
    return [without[row["rollout_id"]] if row["rollout_id"] < 5 else row for row in rows]


def _many_and_one() -> list[Row]:
    """A group of trajectories of two rows beside a group of one row each."""
    return [
        *(row for row in recorded("android_world_history") if row["rollout_id"] < 4),
        *(row for row in recorded("math") if row["rollout_id"] >= 4),
    ]


def _one_token() -> list[Row]:
    """A trajectory of which a single token is trained, the last of a long row."""
    rows = recorded("android_world_incremental")
    first = rows[0]
    mask = [0] * (first["response_length"] - 1) + [1]
    return [{**first, "loss_mask": mask}, *rows[1:]]


ODD: dict[str, Callable[[], list[Row]]] = {
    "dummies": lambda: with_dummies(mixed_rewards(recorded("math")), (2, 5)),
    "all_but_one_dummies": lambda: with_dummies(mixed_rewards(recorded("math")), (0, 1, 2, 4, 5, 6, 7)),
    "dummies_beside_rows": lambda: with_dummies(mixed_rewards(recorded("android_world_history")), (0, 7)),
    "equal_rewards": lambda: with_rewards(recorded("math"), lambda _: 1.0),
    "huge_rewards": lambda: with_rewards(recorded("math"), lambda number: MAX_REWARD * (-1) ** number),
    "tiny_differences": lambda: with_rewards(recorded("math"), lambda number: 1.0 + number * 1e-15),
    "messages_alone": lambda: _messages_alone(mixed_rewards(recorded("math"))),
    "some_messages_alone": lambda: _some_messages_alone(mixed_rewards(recorded("math"))),
    "many_rows_and_one": lambda: mixed_rewards(_many_and_one()),
    "one_trained_token": lambda: mixed_rewards(_one_token()),
}
