"""Whether a reward rose: what is called a rise, and how often chance alone is."""

from __future__ import annotations

import random

import pytest

from rollout_buffer_lab.learning.verdict import judge

DRAWS = 60


def groups(rng: random.Random, mean: float, count: int = 48) -> list[float]:
    """Means of groups of eight episodes that each earn 1 with chance ``mean``."""
    return [sum(rng.random() < mean for _ in range(8)) / 8 for _ in range(count)]


def test_a_clear_rise_is_called_one_and_a_fall_is_not() -> None:
    rng = random.Random(1)
    low, high = groups(rng, 0.4), groups(rng, 0.8)

    assert judge(low, high).rose
    assert not judge(high, low).rose


def test_chance_alone_is_not_called_a_rise() -> None:
    rng = random.Random(2)

    alarms = sum(judge(groups(rng, 0.5, 12), groups(rng, 0.5, 12)).rose for _ in range(DRAWS))

    assert alarms <= 1  # one in a thousand of them is expected: two of 60 would come once in 600 runs


def test_a_rise_that_is_certain_but_tiny_is_not_called_one() -> None:
    verdict = judge([0.50, 0.55, 0.45] * 300, [0.51, 0.56, 0.46] * 300)

    assert verdict.chance < 0.001
    assert not verdict.rose


def test_groups_without_any_spread_can_be_compared() -> None:
    assert judge([0.0] * 20, [1.0] * 20).rose
    assert not judge([1.0] * 20, [1.0] * 20).rose


def test_the_sentence_says_what_was_compared() -> None:
    sentence = judge([0.25] * 10, [0.75] * 12).sentence

    assert "rose, from 0.250 to 0.750" in sentence
    assert "10 groups of the first steps, 12 of the last" in sentence
    assert "did not rise" in judge([0.5, 0.4], [0.4, 0.5]).sentence


def test_an_end_without_groups_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="both ends"):
        judge([], [1.0])
