"""What a device is to an episode: five calls, whatever stands behind them.

Two views of the same thing. ``Device`` is the plain, blocking object that lives in a device worker's process: a phone,
an emulator, a browser page. ``DeviceLease`` is what an episode on the runner's event loop holds: the same calls,
awaitable, carried to the worker by Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from slime_plugins.rollout_buffer.types import Image


class Action(Protocol):
    """What a device is asked to do, as far as whoever carries it there must know. Each kind of device has its own."""

    @property
    def kind(self) -> str:
        """Which of the device's actions this is; for messages."""
        ...

    @property
    def duration_s(self) -> float | None:
        """How long the action itself lasts, on top of the time that any action may take."""
        ...


ActionT_contra = TypeVar("ActionT_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent gets to see after a reset or a step.

    ``screenshot`` is already resized under the pixel cap and encoded: exactly the bytes that the engine receives, that
    are stored, and that are trained on. ``screen_width`` and ``screen_height`` are the device's own pixels, the space
    of ``Action.point``. ``goal`` is the task in words. ``step_budget`` is the task's own limit of actions, None if it
    has none. ``note`` tells the agent what went wrong with its last action (text that could not be typed, an app that
    does not exist); empty when all went well. ``elements`` is the screen in words, for agents that read, a line per
    element; empty where the device offers none. ``done`` is true once the task itself says that it is over: no action
    changes anything from then on.
    """

    goal: str
    screenshot: Image
    screen_width: int
    screen_height: int
    step_budget: int | None = None
    note: str = ""
    elements: str = ""
    done: bool = False
    details: Mapping[str, str] = field(default_factory=dict)


class Device(Protocol[ActionT_contra]):
    """One device. Calls come one at a time; each returns, or raises ``DeviceError`` or ``EnvironmentSetupError``."""

    def reset(self, task_name: str, params_idx: int) -> Observation:
        """Sets up the task from a clean state and returns the first look at it.

        Raises:
            EnvironmentSetupError: no such task, or it cannot be begun.
            DeviceError: the device does not answer.
        """
        ...

    def step(self, action: ActionT_contra) -> Observation:
        """Does the action and returns the settled screen. Impossible actions are reported in ``note``."""
        ...

    def score(self) -> float:
        """The task's success in [0, 1], read from the device's state, before anything resets it.

        A kind of device whose tasks are scored in another range says so to its generator, and to its contract test.
        """
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


class DeviceLease(Protocol[ActionT_contra]):
    """A device held by one episode. Awaitable twin of ``Device``; leaving the context gives it back to the pool."""

    @property
    def device_id(self) -> str:
        """The pool's name for the device, for logs and counters."""
        ...

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``."""
        ...

    async def step(self, action: ActionT_contra) -> Observation:
        """As ``Device.step``."""
        ...

    async def score(self) -> float:
        """As ``Device.score``."""
        ...
