"""``SimulatedPhone``: a ``Device`` for Android World episodes that needs no emulator.

It has state, screens and touches like a phone, for development and tests, but it is not Android.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH
from rollout_buffer_lab.simulated_phone.painting import encode_screen
from rollout_buffer_lab.simulated_phone.tasks.base import Task
from rollout_buffer_lab.simulated_phone.tasks.registry import TaskRun, apps_of, start_task
from rollout_buffer_lab.simulated_phone.user_interface import UserInterface
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.types import Image

_STEP_S = 1.0  # by which every action advances the device's clock
_MAX_WAIT_S = 60.0
_LONG_PRESS_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FailingCalls:
    """Faults to inject, for tests. Calls of ``reset``, ``step`` and ``score`` are counted from 0 over the phone's life.

    The calls in ``at_calls`` raise ``DeviceError`` and change nothing. From call ``dead_from`` on every call and
    ``health`` raise it; None means never.
    """

    at_calls: frozenset[int] = field(default_factory=frozenset)
    dead_from: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPhoneConfig:
    """How the phone behaves.

    ``screenshot_max_pixels`` limits width times height of a screenshot; the default halves 1080x2400.
    ``step_latency_s`` is slept in every reset and step, to be as slow as a real device. ``tasks`` are further tasks by
    name, beside those of the package.
    """

    screenshot_max_pixels: int = 648_000
    image_format: Literal["png", "jpeg"] = "png"
    step_latency_s: float = 0.0
    faults: FailingCalls = field(default_factory=FailingCalls)
    tasks: Mapping[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.screenshot_max_pixels < 1:
            raise ConfigError(f"screenshot_max_pixels must be positive, not {self.screenshot_max_pixels}")
        if self.image_format not in ("png", "jpeg"):
            raise ConfigError(f"image_format must be png or jpeg, not {self.image_format!r}")
        if self.step_latency_s < 0:
            raise ConfigError(f"step_latency_s must not be negative, is {self.step_latency_s}")


class SimulatedPhone:
    """One simulated phone; before ``reset`` only ``health`` works."""

    def __init__(self, config: SimulatedPhoneConfig | None = None) -> None:
        self._config = config or SimulatedPhoneConfig()
        self._run: TaskRun | None = None
        self._ui: UserInterface | None = None
        self._calls = 0
        self._episodes = 0
        self._closed = False

    def reset(self, task_name: str, params_idx: int) -> Observation:
        """Gives the phone a clean state with the task set up; returns the home screen.

        Raises:
            EnvironmentSetupError: there is no such task, or it is already solved before the first step.
            DeviceError: an injected fault, or the phone was closed.
        """
        self._begin_call()
        self._drop_task()
        self._run = start_task(task_name, params_idx, self._config.tasks)
        self._ui = UserInterface(self._run.state)
        self._episodes += 1
        return self._observe(self._run, self._ui, note="")

    def step(self, action: Action) -> Observation:
        """Does the action and returns the new screen; ``note`` says why an action could not be done.

        Raises:
            DeviceError: there is no task, an injected fault, or the phone was closed.
        """
        self._begin_call()
        run, ui = self._running()
        note = self._do(action, run, ui)
        run.state.clock.advance(_STEP_S)
        return self._observe(run, ui, note)

    def score(self) -> float:
        """Returns the task's success in [0, 1], read from the device's state.

        Raises:
            DeviceError: there is no task, an injected fault, or the phone was closed.
        """
        self._begin_call()
        run, _ = self._running()
        return run.score()

    def health(self) -> Mapping[str, str]:
        """Returns short facts about the phone; raises ``DeviceError`` if it is not usable."""
        self._check_usable()
        return {"kind": "simulated_phone", "episodes": str(self._episodes), "calls": str(self._calls)}

    def close(self) -> None:
        """Frees the phone's state; a second call does nothing."""
        self._drop_task()
        self._closed = True

    def _begin_call(self) -> None:
        call, faults = self._calls, self._config.faults
        self._calls += 1
        self._check_usable()
        if call in faults.at_calls:
            raise DeviceError("the simulated phone fails at this call, as configured", {"call": call})

    def _check_usable(self) -> None:
        dead_from = self._config.faults.dead_from
        if self._closed:
            raise DeviceError("the simulated phone is closed")
        if dead_from is not None and self._calls > dead_from:
            raise DeviceError("the simulated phone is dead, as configured", {"dead_from": dead_from})

    def _drop_task(self) -> None:
        if self._run is not None:
            self._run.state.close()
        self._run = self._ui = None

    def _running(self) -> tuple[TaskRun, UserInterface]:
        if self._run is None or self._ui is None:
            raise DeviceError("the simulated phone has no task: reset it first")
        return self._run, self._ui

    def _observe(self, run: TaskRun, ui: UserInterface, note: str) -> Observation:
        if self._config.step_latency_s:
            time.sleep(self._config.step_latency_s)
        image_format = self._config.image_format
        data = encode_screen(ui.screen().widgets, self._config.screenshot_max_pixels, image_format)
        return Observation(
            goal=run.goal,
            screenshot=Image(data=data, media_type=f"image/{image_format}"),
            screen_width=SCREEN_WIDTH,
            screen_height=SCREEN_HEIGHT,
            step_budget=run.task.step_budget,
            note=note,
            details={"app": apps_of(run.task.name)},
        )

    def _do(self, action: Action, run: TaskRun, ui: UserInterface) -> str:
        match action.kind:
            case ActionKind.CLICK | ActionKind.LONG_PRESS | ActionKind.SWIPE:
                return self._touch(action, ui)
            case ActionKind.TYPE:
                return ui.type_text(_well_formed(action.text or ""))
            case ActionKind.OPEN:
                return ui.open_app(_well_formed(action.text or ""))
            case ActionKind.SYSTEM_BUTTON:
                return "No button was named." if action.button is None else ui.press(action.button)
            case ActionKind.WAIT:
                run.state.clock.advance(_clamped(action.duration_s, default=1.0))
            case ActionKind.ANSWER:
                run.answer = _well_formed(action.text or "")
            case ActionKind.TERMINATE:
                pass  # nothing happens on the device; the generator ends the episode
        return ""

    def _touch(self, action: Action, ui: UserInterface) -> str:
        if action.point is None or not _on_screen(action.point):
            return f"There is no such place on the screen: {action.point}."
        x, y = action.point
        if action.kind is ActionKind.CLICK:
            return ui.tap(x, y)
        if action.kind is ActionKind.LONG_PRESS:
            return ui.long_press(x, y, _clamped(action.duration_s, default=_LONG_PRESS_S))
        if action.end_point is None or not _on_screen(action.end_point):
            return f"There is no such place on the screen: {action.end_point}."
        return ui.swipe(x, y, *action.end_point)


def _on_screen(point: tuple[int, int]) -> bool:
    return 0 <= point[0] < SCREEN_WIDTH and 0 <= point[1] < SCREEN_HEIGHT


def _clamped(seconds: float | None, default: float) -> float:
    """Returns ``seconds`` limited to 0 … one minute; ``default`` for None and NaN."""
    if seconds is None or seconds != seconds:
        return default
    return min(_MAX_WAIT_S, max(0.0, seconds))


def _well_formed(text: str) -> str:
    """Returns the text with unpaired surrogates replaced, because no database and no file can store them."""
    return text.encode("utf-8", "replace").decode("utf-8")
