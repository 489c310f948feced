"""Which numbers are rewards."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.rewards import LARGEST_REWARD, as_reward


@given(value=st.floats(-LARGEST_REWARD, LARGEST_REWARD))
def test_a_finite_number_of_32_bits_is_its_own_reward(value: float) -> None:
    assert as_reward(value) == value


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


def test_the_largest_reward_is_that_of_32_bits() -> None:
    assert float(np.finfo(np.float32).max) == LARGEST_REWARD
