"""Which numbers and lists a generator may give as rewards."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.validity import as_reward, as_token_rewards, as_turn_rewards


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), Decimal("0.5")])
def test_numbers_of_libraries_are_rewards(value: Any) -> None:
    assert as_reward(value) == 0.5
    assert type(as_reward(value)) is float


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "a boolean"),
        (np.bool_(False), "a boolean"),
        (None, "must be a number"),
        ("1.0", "a string"),
        ([1.0], "must be a number"),
        (math.nan, "finite"),
        (-math.inf, "finite"),
        (10**400, "finite"),
        (1e308, "32 bits"),
        (-3.5e38, "32 bits"),
    ],
)
def test_what_cannot_be_trained_is_no_reward(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_reward(value)


@given(rewards=st.lists(st.floats(-1e6, 1e6), max_size=6))
def test_rewards_of_turns_are_one_number_for_each_turn(rewards: list[float]) -> None:
    assert as_turn_rewards(rewards, len(rewards)) == tuple(rewards)
    assert as_turn_rewards(None, 3) is None
    for turns in {0, len(rewards) + 1, len(rewards) + 7} - {len(rewards)}:
        with pytest.raises(ValueError, match=f"has {len(rewards)} entries for the {turns} turns that are trained"):
            as_turn_rewards(rewards, turns)


@pytest.mark.parametrize(
    ("value", "says"),
    [("12", "must be a list, not a string"), (3.0, "must be a list, not float"), ({}, "must be a list, not dict")]
    + [([1.0, value], "finite") for value in (math.nan, math.inf, 10**400)]
    + [([1.0, None], "must be a number, not null"), ([1.0, True], "not a boolean")],
)
def test_what_is_no_list_of_rewards_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_turn_rewards(value, 2)


def test_rewards_of_tokens_are_one_number_for_each_token_of_a_turn_or_none_for_it() -> None:
    assert as_token_rewards([None, [-1.0, 0]], [3, 2]) == (None, (-1.0, 0.0))
    assert as_token_rewards([None, None], [None, None]) == (None, None)
    with pytest.raises(ValueError, match="of turn 1 has 3 entries for the 2 sampled tokens of turn 1"):
        as_token_rewards([None, [0.0, 0.0, 0.0]], [3, 2])
    with pytest.raises(ValueError, match="in turn 0, whose tokens are not known: send generations"):
        as_token_rewards([[0.0]], [None])
    with pytest.raises(ValueError, match="of turn 0 must be a finite number"):
        as_token_rewards([[math.nan]], [1])
