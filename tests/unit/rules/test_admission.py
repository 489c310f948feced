"""Which group may begin so that it is trained before its weights are too old: the rules by themselves."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate_staleness import Scenario, Simulation, compare
from slime_plugins.rollout_buffer.rules.admission import (
    GroupsAhead,
    GroupTimes,
    Pace,
    VersionSeen,
    pace_of,
    room_for_groups,
    should_defer,
    should_wait_for_slow_groups,
    version_at,
)
from tests.example_counts import examples

COUNTS = st.integers(0, 300)
SECONDS = st.none() | st.floats(0, 1e6)
PACES = st.builds(Pace, version_s=SECONDS, step_s=SECONDS, groups_per_version=st.none() | st.floats(0, 1e4))
AHEAD = st.builds(GroupsAhead, taken=COUNTS, ready=COUNTS, running=COUNTS, trainer_waits=st.booleans())
LAGS = st.integers(0, 10)

PACE = Pace(version_s=100.0, step_s=60.0, groups_per_version=8)


def ahead(taken: int = 0, ready: int = 0, running: int = 0, *, trainer_waits: bool = False) -> GroupsAhead:
    return GroupsAhead(taken=taken, ready=ready, running=running, trainer_waits=trainer_waits)


# --- room ------------------------------------------------------------------------------------------------------------


def test_a_lag_of_two_leaves_room_for_three_versions_groups() -> None:
    assert room_for_groups(2, PACE, ahead()) == 24
    assert room_for_groups(2, PACE, ahead(taken=8, ready=3, running=5)) == 8
    assert room_for_groups(0, PACE, ahead(taken=8)) == 0


@given(LAGS, PACES, COUNTS)
def test_a_trainer_that_waits_with_nothing_on_its_way_gets_a_group(lag: int, pace: Pace, taken: int) -> None:
    assert room_for_groups(lag, pace, ahead(taken, trainer_waits=True)) != 0


@given(LAGS, PACES, AHEAD, COUNTS)
def test_more_ahead_never_makes_more_room(lag: int, pace: Pace, now: GroupsAhead, more: int) -> None:
    room = room_for_groups(lag, pace, now)
    later = ahead(now.taken, now.ready + more, now.running, trainer_waits=now.trainer_waits)
    assert room is None or (room_for_groups(lag, pace, later) or 0) <= room


@given(st.integers(0, 5), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=30, max_size=120))
@examples(200)
def test_groups_that_come_in_order_are_never_older_than_the_lag(lag: int, batch: int, steps: list[int]) -> None:
    """The trainer takes the ``batch`` oldest groups a version, at any moments; groups begin while there is room."""
    pace = Pace(version_s=1.0, step_s=1.0, groups_per_version=batch)
    version = taken = 0
    begun: deque[int] = deque()
    for begin in steps:
        for _ in range(begin):
            if room_for_groups(lag, pace, ahead(taken, len(begun))):
                begun.append(version)
        if taken < batch and begun:
            assert version - begun.popleft() <= lag
            taken += 1
        elif taken == batch:
            version, taken = version + 1, 0


def test_a_trainer_whose_steps_have_become_larger_is_not_left_waiting() -> None:
    waits = ahead(taken=8, trainer_waits=True)
    assert room_for_groups(0, PACE, waits) == 8
    assert room_for_groups(0, PACE, ahead(taken=8)) == 0


# --- what is slow ----------------------------------------------------------------------------------------------------


def test_a_slow_group_lets_others_first_only_while_a_backlog_makes_the_trainer_quick() -> None:
    assert not should_defer(4, PACE, ahead(), 390.0)
    assert should_defer(4, PACE, ahead(taken=8, ready=8), 390.0)
    assert not should_defer(4, PACE, ahead(taken=8, ready=8), 90.0)


@given(LAGS, PACES, AHEAD, st.none() | st.integers(0, 99), st.floats(0, 1e7))
def test_a_trainer_waits_for_the_slow_for_two_versions_time_at_most(
    lag: int, pace: Pace, now: GroupsAhead, behind: int | None, waited_s: float
) -> None:
    if should_wait_for_slow_groups(lag, pace, now, oldest_is_behind=behind, waited_s=waited_s):
        assert pace.version_s is not None
        assert waited_s < 2 * pace.version_s
        assert behind is not None
        assert behind >= lag > 0


def test_a_trainer_waits_for_the_slow_only_while_the_devices_have_room() -> None:
    def waits(now: GroupsAhead, *, behind: int = 2, waited_s: float = 0.0) -> bool:
        return should_wait_for_slow_groups(2, PACE, now, oldest_is_behind=behind, waited_s=waited_s)

    assert waits(ahead(ready=8, running=8))
    assert not waits(ahead(ready=12, running=8)), "the devices would soon have nothing to begin"
    assert not waits(ahead(ready=8, running=8), behind=1)
    assert not waits(ahead(ready=8, running=8), waited_s=200.0)
    assert not waits(ahead(taken=8, ready=1, running=1)), "it has its groups and wants more"


# --- what is known ---------------------------------------------------------------------------------------------------


def seen(*versions: tuple[int, float, float, int]) -> list[VersionSeen]:
    return [VersionSeen(version=v, since=since, last_taken_at=at, groups=n) for v, since, at, n in versions]


def test_the_pace_is_that_of_most_versions_and_one_pause_does_not_change_it() -> None:
    history = seen((1, 0, 40, 8), (2, 100, 140, 8), (3, 200, 240, 8), (4, 9000, 9040, 9), (5, 9100, 9100, 0))
    assert pace_of(history) == Pace(version_s=100, step_s=60, groups_per_version=8)


def test_the_version_of_a_moment_is_the_newest_that_had_begun() -> None:
    history = seen((3, 10, 12, 8), (4, 20, 22, 8))
    assert [version_at(history, moment) for moment in (0, 10, 19.9, 20, 99)] == [3, 3, 3, 4, 4]
    assert version_at([], 5.0) is None


def test_a_group_is_expected_to_take_what_its_own_kind_took() -> None:
    times = GroupTimes(group_size=4)
    assert times.expected_s("i", "t") is None
    for _ in range(8):
        times.add("quick", "short", 1.0)
        times.add("slow", "long", 50.0)
    assert times.expected_s("slow", "long") == 50.0
    assert times.expected_s("new", "short") == 1.0
    assert times.expected_s("new", "new") == 50.0, "of all: one member in two is slow"


# --- all together ----------------------------------------------------------------------------------------------------

SCENARIOS = st.builds(
    Scenario,
    times=st.sampled_from(["constant", "lognormal:1.5", "pareto:1.1:2000", "bimodal:0.05:300"]),
    alike=st.sampled_from(["episodes", "groups", "tasks"]),
    lag=st.integers(0, 3),
    devices=st.integers(1, 12),
    group_size=st.integers(1, 4),
    batch=st.integers(1, 6),
    versions=st.just(8),
    step=st.sampled_from([0.0, 0.5, 3.0]),
    pauses=st.sampled_from([(), ((2, 500.0),), ((0, 40.0), (3, 1.0))]),
    failing=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 10**6),
)


@given(SCENARIOS)
@examples(30)
def test_a_trainer_gets_all_its_versions_whatever_the_times_and_pauses(scenario: Scenario) -> None:
    result = Simulation(scenario, "admit").run()
    assert result.dropped == 0
    assert result.throughput > 0


@pytest.mark.parametrize("times", ["lognormal:1", "bimodal:0.1:10"])
def test_what_is_admitted_is_closer_to_what_was_submitted_than_what_dropping_leaves(times: str) -> None:
    scenario = Scenario(times=times, alike="groups", versions=60)
    admit, drop = compare(scenario, ["admit", "drop"])
    assert admit.distance < drop.distance
    assert admit.busy >= 0.95
    assert admit.within >= 0.99
    assert admit.throughput > 0.98 * drop.throughput


def test_the_first_batches_after_a_start_are_shorter_and_better_rewarded_than_what_was_submitted() -> None:
    simulation = Simulation(Scenario(times="lognormal:1", alike="groups", versions=41), "admit")
    simulation.run()
    start = simulation.bias_of_first_batches()
    (first, better), (last, alike) = start[1], start[40]
    assert first < -0.2 < last
    assert better > 0.05 > alike
