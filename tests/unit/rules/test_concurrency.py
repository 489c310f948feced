"""How many episodes play at once: within bounds, down when the engine queues, up when there is room, never stuck."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate_concurrency import SETTINGS, Setting, Simulation, share_of_best
from slime_plugins.rollout_buffer.rules.concurrency import (
    Bounds,
    ConcurrencyState,
    Load,
    Observation,
    Reason,
    adjust,
    initial_state,
)

BOUNDS = st.tuples(st.integers(1, 64), st.integers(0, 400), st.integers(1, 64)).map(
    lambda sizes: Bounds(min_limit=sizes[0], max_limit=sizes[0] + sizes[1], step=sizes[2])
)
COUNTS = st.floats(0, 4096)
LOADS = st.builds(
    Load,
    playing=COUNTS,
    is_limiting=st.booleans(),
    rate=st.none() | st.floats(0, 1e6),
    engine_running=st.none() | COUNTS,
    engine_waiting=st.none() | COUNTS,
    devices_free=st.none() | st.integers(0, 512),
    devices_waited_for=COUNTS,
)
SOME = Bounds(min_limit=4, max_limit=1024, step=4)


@given(BOUNDS, st.lists(LOADS, max_size=40))
def test_the_limit_stays_within_its_bounds_whatever_happens(bounds: Bounds, loads: list[Load]) -> None:
    now = initial_state(bounds)
    for load in loads:
        now = adjust(now, load, bounds)
        assert 1 <= bounds.min_limit <= now.limit <= bounds.max_limit


@given(BOUNDS, st.lists(LOADS, max_size=40), st.integers(0, 512))
def test_the_limit_rises_to_its_bound_while_devices_idle_and_nothing_queues(
    bounds: Bounds, loads: list[Load], free: int
) -> None:
    """Whatever happened before: once the rate grows with each further episode, the limit reaches its upper bound."""
    now = initial_state(bounds)
    for load in loads:
        now = adjust(now, load, bounds)
    for _ in range(bounds.max_limit + 100):
        now = adjust(now, Load(playing=now.limit, is_limiting=True, rate=10.0 * now.limit, devices_free=free), bounds)
    reached = Load(playing=now.limit, is_limiting=True, rate=10.0 * now.limit, devices_free=free)
    assert adjust(now, reached, bounds).limit >= min(bounds.max_limit, now.limit + (free > 0))


@given(BOUNDS, st.lists(LOADS, max_size=10), st.floats(0, 1000))
def test_the_limit_falls_when_the_engine_queues(bounds: Bounds, loads: list[Load], running: float) -> None:
    now = initial_state(bounds)
    for load in loads:
        now = adjust(now, load, bounds)
    queued = Load(playing=now.limit, is_limiting=True, engine_running=running, engine_waiting=running + 2, rate=1.0)
    after = adjust(now, queued, bounds)
    assert after.reason is Reason.ENGINE_QUEUES
    assert after.limit < now.limit or after.limit == bounds.min_limit
    again = adjust(after, replace(queued, playing=now.limit), bounds)
    assert again.limit == after.limit or now.limit == after.limit, (
        "episodes above the new limit play on, and lower it only once"
    )


@given(st.integers(4, 1000), st.integers(1, 64))
def test_the_limit_rises_while_devices_idle_and_nothing_queues(limit: int, free: int) -> None:
    now = ConcurrencyState(limit=limit, searching=False)
    load = Load(playing=limit, is_limiting=True, engine_running=limit, engine_waiting=0, devices_free=free)
    assert limit < adjust(now, load, SOME).limit <= limit + SOME.step


def test_the_first_search_doubles_and_ends_where_more_bring_nothing() -> None:
    now, limits = initial_state(SOME), []
    for _ in range(6):
        limits.append(now.limit)
        now = adjust(now, Load(playing=now.limit, is_limiting=True, rate=min(now.limit, 100.0)), SOME)
    assert limits == [16, 32, 64, 128, 256, 204]
    assert now.reason is Reason.NO_GAIN


@pytest.mark.parametrize("knee", [20, 100, 500])
def test_the_limit_settles_where_the_rate_stops_growing(knee: int) -> None:
    now, limits = initial_state(SOME), []
    for _ in range(200):
        now = adjust(now, Load(playing=now.limit, is_limiting=True, rate=float(min(now.limit, knee))), SOME)
        limits.append(now.limit)
    settled = limits[100:]
    assert min(settled) >= 0.75 * knee
    assert max(settled) <= 2 * knee


def test_there_are_no_more_episodes_than_devices_and_a_few_that_wait() -> None:
    now = ConcurrencyState(limit=200)
    after = adjust(now, Load(playing=200, is_limiting=True, devices_free=0, devices_waited_for=136), SOME)
    assert (after.limit, after.reason) == (68, Reason.DEVICES)
    assert adjust(after, Load(playing=68, is_limiting=True, devices_free=0, devices_waited_for=4), SOME).limit == 68


def test_while_more_episodes_play_than_the_limit_their_rate_does_not_change_it() -> None:
    now = ConcurrencyState(limit=64, searching=False, seen=(Observation(0, 32.0, 100.0),))
    assert adjust(now, Load(playing=80, is_limiting=True, rate=1.0), SOME).limit == 64


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_in_the_simulation_the_limit_comes_close_to_the_best_fixed_number(setting: Setting) -> None:
    """An hour of the runner's own control of the limit on a simulated clock, from the start of the job on."""
    runs = [asyncio.run(Simulation(setting, limit, seconds=3600, seed=5).run()) for limit in (64, None)]
    assert share_of_best(runs)["auto"] > 0.85
    if setting.cache < 512 or setting.knee < 64:
        longest = asyncio.run(Simulation(setting, 512, seconds=3600, seed=5).run())
        assert runs[1].episode_s < longest.episode_s / 3, "episodes are not made slow for nothing"
