"""When devices boot: never closer together than asked; pauses grow only once the attempts are used up."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.devices.boot_schedule import BootSchedule, retry_pause_s
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings

SETTINGS = DevicePoolSettings.model_validate({"kind": "device:of_a_test", "boot_attempts": 10, "boot_pause_s": 10})
SECONDS = st.integers(min_value=0, max_value=10_000)


@given(steps=st.lists(SECONDS, min_size=1, max_size=30), stagger_s=st.integers(min_value=0, max_value=60))
def test_boots_begin_apart_and_none_waits_for_nothing(steps: list[int], stagger_s: int) -> None:
    schedule, now, begun = BootSchedule(0), 0, []
    for step in steps:
        now += step
        begun.append(now + schedule.take_turn(now, stagger_s))
    assert all(later - earlier >= stagger_s for earlier, later in itertools.pairwise(begun))
    assert begun[0] == steps[0]


def test_a_device_is_tried_ten_times_with_ten_seconds_between_and_then_more_seldom() -> None:
    assert [retry_pause_s(failures, SETTINGS) for failures in range(1, 11)] == [10] * 10
    beyond = [retry_pause_s(failures, SETTINGS) for failures in range(11, 40)]
    assert beyond == sorted(beyond)
    assert 10 < beyond[0] < beyond[-1] == 160
