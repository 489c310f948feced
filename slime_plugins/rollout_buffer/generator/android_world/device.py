"""What an Android device is to an episode: five calls, whatever stands behind them.

Two views of the same thing. ``Device`` is the plain, blocking object that lives in a device worker's process: the
simulated phone, or the real ``android_world`` package on an emulator. ``DeviceLease`` is what an episode on the
runner's event loop holds: the same calls, awaitable, carried to the worker by Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from slime_plugins.rollout_buffer.types import Image

__all__ = ["Action", "ActionKind", "Device", "DeviceLease", "Observation", "ReportsLoss", "SystemButton"]


class ActionKind(StrEnum):
    """The nine things the agent can do (the ``mobile_use`` tool)."""

    CLICK = "click"
    LONG_PRESS = "long_press"
    SWIPE = "swipe"
    TYPE = "type"
    ANSWER = "answer"
    SYSTEM_BUTTON = "system_button"
    OPEN = "open"
    WAIT = "wait"
    TERMINATE = "terminate"


class SystemButton(StrEnum):
    """The hardware and navigation buttons."""

    BACK = "Back"
    HOME = "Home"
    MENU = "Menu"
    ENTER = "Enter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One action in device pixels, already validated. Fields that the kind does not use are None."""

    kind: ActionKind
    point: tuple[int, int] | None = None
    end_point: tuple[int, int] | None = None
    text: str | None = None
    button: SystemButton | None = None
    duration_s: float | None = None
    status: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent gets to see after a reset or a step.

    ``screenshot`` is already resized under the pixel cap and encoded: exactly the bytes that the engine receives, that
    are stored, and that are trained on. ``screen_width`` and ``screen_height`` are the device's own pixels, the space
    of ``Action.point``. ``goal`` is the task in words. ``step_budget`` is the task's own limit of actions, None if it
    has none. ``note`` tells the agent what went wrong with its last action (text that could not be typed, an app that
    does not exist); empty when all went well.
    """

    goal: str
    screenshot: Image
    screen_width: int
    screen_height: int
    step_budget: int | None = None
    note: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


class Device(Protocol):
    """One phone. Calls come one at a time; each returns, or raises ``DeviceError`` or ``EnvironmentSetupError``."""

    def reset(self, task_name: str, params_idx: int) -> Observation:
        """Sets up the task from a clean state and returns the first look at it.

        Raises:
            EnvironmentSetupError: no such task, or it is already solved before the first step.
            DeviceError: the device does not answer.
        """
        ...

    def step(self, action: Action) -> Observation:
        """Does the action and returns the settled screen. Impossible actions are reported in ``note``."""
        ...

    def score(self) -> float:
        """The task's success in [0, 1], read from the device's state, before anything resets it."""
        ...

    def health(self) -> Mapping[str, str]:
        """Short facts about the device; raises ``DeviceError`` when it is not usable."""
        ...

    def close(self) -> None:
        """Ends everything the device started; a second call does nothing."""
        ...


@runtime_checkable
class ReportsLoss(Protocol):
    """A ``Device`` that knows between two calls that it is gone: its episode need not wait for the next one."""

    def lost(self) -> str:
        """Returns why the device cannot be used any more, "" while it can. Cheap; another call may be under way."""
        ...


class DeviceLease(Protocol):
    """A device held by one episode. Awaitable twin of ``Device``; leaving the context gives it back to the pool."""

    @property
    def device_id(self) -> str:
        """The pool's name for the device, for logs and counters."""
        ...

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``."""
        ...

    async def step(self, action: Action) -> Observation:
        """As ``Device.step``."""
        ...

    async def score(self) -> float:
        """As ``Device.score``."""
        ...
