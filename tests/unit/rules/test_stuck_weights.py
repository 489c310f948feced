"""Whose weight version stands still, engine or trainer: known from episodes sampled by weights older than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.admission import VersionSeen
from slime_plugins.rollout_buffer.rules.stuck_weights import SampledEpisode, StuckCounter, stuck_weights

STEP_S = 100.0


def versions(count: int) -> list[VersionSeen]:
    """One version every 100 s, from version 1 at 0 s."""
    return [
        VersionSeen(version=number + 1, since=number * STEP_S, last_taken_at=number * STEP_S + 1, groups=8)
        for number in range(count)
    ]


def episodes(count: int, *, began_at: float, version: int | None) -> list[SampledEpisode]:
    return [SampledEpisode(group_key=at // 2, began_at=began_at, oldest_version=version) for at in range(count)]


def test_episodes_that_begin_late_and_are_sampled_by_old_weights_say_that_the_engine_stands_still() -> None:
    found = stuck_weights(1, versions(8), episodes(32, began_at=650.0, version=1), steps=7)
    assert found is not None
    assert (found.who, found.count, found.version, found.trainers_version) == (StuckCounter.ENGINE, 32, 1, 8)


@given(
    lag=st.none() | st.integers(0, 5),
    took=st.lists(st.floats(0, 5000), min_size=12, max_size=32),
    behind=st.integers(0, 1),
)
def test_an_engine_that_follows_is_never_blamed_however_long_episodes_take(
    lag: int | None, took: list[float], behind: int
) -> None:
    """The oldest version of each is that at its beginning, or the one before, if new weights reach the engine late."""
    seen = versions(60)
    ended = 5900.0
    newest = [
        SampledEpisode(
            group_key=at, began_at=ended - seconds, oldest_version=max(1, int((ended - seconds) // STEP_S) + 1 - behind)
        )
        for at, seconds in enumerate(took)
    ]
    assert stuck_weights(lag, seen, newest, steps=60) is None


@given(lag=st.integers(0, 4), stands_at=st.integers(0, 3), count=st.integers(0, 32))
def test_an_engine_that_stands_is_named_as_soon_as_enough_episodes_show_it(
    lag: int, stands_at: int, count: int
) -> None:
    seen = versions(stands_at + lag + 2)
    newest = episodes(count, began_at=seen[-1].since + 1, version=stands_at)
    found = stuck_weights(lag, seen, newest, steps=0)
    assert (found is not None and found.who is StuckCounter.ENGINE) is (count >= 12)
    assert stuck_weights(lag, seen[:-1], newest, steps=0) is None


def test_episodes_of_a_single_group_give_no_verdict() -> None:
    newest = [SampledEpisode(group_key=1, began_at=650.0, oldest_version=1)] * 32
    assert stuck_weights(1, versions(8), newest, steps=7) is None


def test_a_trainer_that_trains_without_new_versions_is_named_where_a_lag_is_asked_for() -> None:
    newest = episodes(32, began_at=5.0, version=1)
    found = stuck_weights(1, versions(1), newest, steps=3)
    assert found is not None
    assert (found.who, found.count, found.version) == (StuckCounter.TRAINER, 3, 1)
    assert stuck_weights(1, versions(1), newest, steps=2) is None
    assert stuck_weights(None, versions(1), newest, steps=30) is None
    assert stuck_weights(1, versions(2), newest, steps=30) is None


def test_an_engine_that_names_no_version_leaves_the_age_unknown() -> None:
    newest = episodes(12, began_at=5.0, version=None)
    for seen in ([], versions(9)):
        found = stuck_weights(4, seen, newest, steps=0)
        assert found is not None
        assert found.who is StuckCounter.UNKNOWN
    assert stuck_weights(None, [], newest, steps=9) is None
    assert stuck_weights(4, [], newest[:11], steps=0) is None
