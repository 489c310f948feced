"""A device without a phone, for tests of code that uses devices: it counts its steps and breaks on demand.

Its kind is ``slime_plugins.rollout_buffer.testing.fake_device:create_device``.
Its behaviour depends on the task of the last reset:

=============  =========================================================================
task           behaviour
=============  =========================================================================
``Solved``     success 1 after the first step
``Half``       success 0.5
``Failed``     success 0
``NoSuch``     ``EnvironmentSetupError`` on reset
``Offline``    ``DeviceError`` on every step
``Bug``        an exception of another kind on every step
``Hang``       a step that takes ten minutes
``Slow``       a step that takes half a second
``Exit``       the whole process is gone in the first step, as after a crash
``Dies``       the device is lost half a second after its set-up, and reports it
=============  =========================================================================

After an action with the text ``NoSuchApp``, the observation's note says that there is no such app.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.devices.interface import Device, Observation
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.types import Image

ADDRESS = f"{__name__}:create_device"
SLOW_STEP_S = 0.5
DIES_AFTER_S = 0.5
HUNG_STEP_S = 600.0
_SUCCESS = {"Solved": 1.0, "Half": 0.5}


class FakeDevice:
    """A ``Device`` of 1080x2400 whose screenshots are not pictures but differ with every step."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.actions: list[Any] = []
        self.closed = False
        self._task_name = ""
        self._params_idx = 0
        self._reset_at = 0.0

    def reset(self, task_name: str, params_idx: int) -> Observation:
        if task_name == "NoSuch":
            raise EnvironmentSetupError(f"there is no task {task_name}")
        self._task_name, self._params_idx = task_name, params_idx
        self.actions = []
        self._reset_at = time.monotonic()
        return self._observation()

    def step(self, action: Any) -> Observation:
        self.actions.append(action)
        if self._task_name == "Offline":
            raise DeviceError("the fake device is offline")
        if self._task_name == "Bug":
            raise ZeroDivisionError("a mistake in the device")
        if self._task_name == "Exit":
            os._exit(1)
        time.sleep({"Hang": HUNG_STEP_S, "Slow": SLOW_STEP_S}.get(self._task_name, 0.0))
        return self._observation()

    def score(self) -> float:
        return _SUCCESS.get(self._task_name, 0.0) if self.actions else 0.0

    def health(self) -> Mapping[str, str]:
        """As ``Device.health``; holds the process id."""
        if self.closed:
            raise DeviceError("the fake device is closed")
        return {"pid": str(os.getpid())}

    def lost(self) -> str:
        dead = self._task_name == "Dies" and time.monotonic() > self._reset_at + DIES_AFTER_S
        return "the fake device has died" if dead else ""

    def close(self) -> None:
        self.closed = True

    def _observation(self) -> Observation:
        seen = f"{self._task_name} {self._params_idx} step {len(self.actions)}"
        unknown_app = self.actions and getattr(self.actions[-1], "text", None) == "NoSuchApp"
        return Observation(
            goal=f"Play {self._task_name} number {self._params_idx}.",
            screenshot=Image(data=seen.encode()),
            screen_width=1080,
            screen_height=2400,
            step_budget=10,
            note="There is no app called NoSuchApp." if unknown_app else "",
            details={"app": "scripted", "pid": str(os.getpid())},
        )


def create_device(options: object, index: int) -> Device[Any]:
    """A ``DeviceKind``, and a factory for Android World's ``device``; its options are ignored."""
    del options
    return FakeDevice(index)
