"""The conformance suite of ``Device``, as tests to inherit.

    class TestMyDevice(DeviceContract):
        task, unknown_task = ("Solved", 0), "NoSuch"

        @pytest.fixture
        def device(self): ...

        def harmless_action(self): ...

``task`` can be set up and does not start solved; ``harmless_action`` returns an action that the device accepts at any
time and that solves nothing. The fake device, the simulated phone and the browser page of ``miniwob`` pass. Nothing
here imports pytest.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from abc import abstractmethod
from typing import Any, ClassVar

from slime_plugins.rollout_buffer.devices.interface import Device, Observation, ReportsLoss
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.types import image_hash


class DeviceContract:
    """Behaviour that the pool and an episode rely on."""

    task: ClassVar[tuple[str, int]]
    unknown_task: ClassVar[str] = "there is no such task"
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    @abstractmethod
    def harmless_action(self) -> Any:
        """Returns an action that solves nothing."""

    def test_a_reset_shows_the_task(self, device: Device[Any]) -> None:
        first = device.reset(*self.task)
        assert first.goal.strip()
        assert_is_observation(first)

    def test_every_step_gives_an_observation(self, device: Device[Any]) -> None:
        first = device.reset(*self.task)
        after = device.step(self.harmless_action())
        assert_is_observation(after)
        assert (after.goal, after.step_budget) == (first.goal, first.step_budget)
        assert (after.screen_width, after.screen_height) == (first.screen_width, first.screen_height)

    def test_the_score_is_in_its_range_and_reading_it_changes_nothing(self, device: Device[Any]) -> None:
        device.reset(*self.task)
        device.step(self.harmless_action())
        scores = [device.score() for _ in range(2)]
        assert scores[0] == scores[1]
        low, high = self.score_range
        assert all(math.isfinite(score) and low <= score <= high for score in scores)

    def test_the_same_task_has_the_same_goal(self, device: Device[Any]) -> None:
        goals = {device.reset(*self.task).goal for _ in range(2)}
        assert len(goals) == 1

    def test_an_unknown_task_is_the_tasks_fault_and_the_device_goes_on(self, device: Device[Any]) -> None:
        assert raised(lambda: device.reset(self.unknown_task, 0), EnvironmentSetupError)
        assert device.reset(*self.task).goal
        device.health()

    def test_a_device_is_well_before_and_after_a_task(self, device: Device[Any]) -> None:
        before = device.health()
        device.reset(*self.task)
        after = device.health()
        assert all(isinstance(fact, str) for facts in (before, after) for fact in (*facts, *facts.values()))

    def test_a_device_that_lives_is_not_lost(self, device: Device[Any]) -> None:
        device.reset(*self.task)
        assert not isinstance(device, ReportsLoss) or device.lost() == ""

    def test_actions_and_observations_travel_between_processes(self, device: Device[Any]) -> None:
        action = self.harmless_action()
        assert isinstance(str(action.kind), str)
        assert action.duration_s is None or action.duration_s >= 0
        assert pickle.loads(pickle.dumps(action)) == action
        observation = device.reset(*self.task)
        assert pickle.loads(pickle.dumps(observation)) == observation

    def test_closing_twice_does_nothing_and_a_closed_device_says_so(self, device: Device[Any]) -> None:
        device.reset(*self.task)
        device.close()
        device.close()
        assert raised(device.health, DeviceError)


def assert_is_observation(seen: Observation) -> None:
    """Checks an observation: screenshot, screen size, step budget, note."""
    assert seen.screenshot.sha256 == image_hash(seen.screenshot.data)
    assert min(seen.screen_width, seen.screen_height) > 0
    assert seen.step_budget is None or seen.step_budget > 0
    assert isinstance(seen.note, str)


def raised(call: Any, kind: type[Exception]) -> bool:
    """Returns True if a call raised this kind of error; other errors propagate."""
    with contextlib.suppress(kind):
        call()
        return False
    return True
