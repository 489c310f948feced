"""Waits double, end at their cap, and are spread by jitter; no number of failures is too many."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.backoff import backoff_s


def test_waits_begin_at_first_s_and_double_up_to_longest_s() -> None:
    waits = [backoff_s(failures, first_s=0.5, longest_s=3.0) for failures in range(1, 6)]
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("failures", [0, -1])
def test_without_a_failure_nobody_waits(failures: int) -> None:
    assert backoff_s(failures, first_s=1.0, longest_s=2.0) == 0.0


@given(st.integers(1, 10**9), st.floats(0.001, 100), st.floats(0.001, 1000), st.floats(0, 1))
def test_jitter_takes_at_most_half_and_any_number_of_failures_has_a_finite_wait(
    failures: int, first_s: float, longest_s: float, jitter: float
) -> None:
    whole = backoff_s(failures, first_s=first_s, longest_s=longest_s)
    wait = backoff_s(failures, first_s=first_s, longest_s=longest_s, jitter=jitter)
    assert math.isfinite(whole)
    assert whole / 2 <= wait <= whole <= longest_s
    assert whole <= backoff_s(failures + 1, first_s=first_s, longest_s=longest_s)
