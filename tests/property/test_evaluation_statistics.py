"""pass@k against counting every choice, intervals against what defines them, and against many drawn evaluations."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.evaluation.statistics import (
    mean_difference,
    mean_over_tasks,
    pass_at_k,
    wilson_interval,
)
from tests.example_counts import examples

shares = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=40)


@pytest.mark.parametrize("attempts", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_with_a_solved_attempt(attempts: int) -> None:
    for solved in range(attempts + 1):
        outcomes = [True] * solved + [False] * (attempts - solved)
        for k in range(1, attempts + 1):
            choices = list(itertools.combinations(outcomes, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(attempts, solved, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("solved", "tries", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_the_published_ones(solved: int, tries: int, low: float, high: float) -> None:
    assert wilson_interval(solved / tries, tries) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_wilson_ends_are_where_the_score_test_just_accepts(tries: int, data: st.DataObject) -> None:
    rate = data.draw(st.integers(0, tries)) / tries
    low, high = wilson_interval(rate, tries)
    z = statistics.NormalDist().inv_cdf(0.975)
    assert 0 <= low <= rate <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (rate - end) ** 2 == pytest.approx(z * z * end * (1 - end) / tries, abs=1e-9)


@given(shares, st.integers(1, 8))
def test_an_interval_holds_its_mean_and_is_never_narrower_than_independent_tries_allow(
    values: list[float], attempts: int
) -> None:
    tries = len(values) * attempts
    estimate = mean_over_tasks(values, tries)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.high - estimate.low >= _width(wilson_interval(estimate.value, tries)) - 1e-12
    assert estimate.high - estimate.low <= _width(wilson_interval(estimate.value, len(values))) + 1e-12
    assert estimate.high > estimate.low


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(400):
        chances = [rng.betavariate(0.6, 0.9) for _ in range(40)]
        solved = [sum(rng.random() < chance for _ in range(4)) / 4 for chance in chances]
        estimate = mean_over_tasks(solved, 160)
        held += estimate.low <= 0.4 <= estimate.high
    assert 0.92 <= held / 400 <= 0.99


def test_bootstrap_intervals_of_a_difference_hold_it_about_as_often_as_they_say() -> None:
    rng = random.Random(4)
    held = 0
    for seed in range(40):
        differences = [rng.choice((-0.5, 0.0, 0.0, 0.5, 0.5)) for _ in range(60)]
        estimate = mean_difference(differences, seed)
        held += estimate.low <= 0.1 <= estimate.high
    assert held / 40 >= 0.85


@examples(20)
@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=12))
def test_a_difference_is_the_same_for_the_same_seed_and_turns_its_sign_with_its_tasks(values: list[float]) -> None:
    estimate = mean_difference(values, 7)
    assert estimate == mean_difference(values, 7)
    assert min(values) <= estimate.low <= estimate.high <= max(values)
    assert estimate.value == pytest.approx(-mean_difference([-value for value in values], 7).value)
    assert all(map(math.isfinite, (estimate.low, estimate.high)))


def _width(interval: tuple[float, float]) -> float:
    return interval[1] - interval[0]
