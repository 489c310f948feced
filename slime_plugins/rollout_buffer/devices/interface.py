"""The interface of devices.

``Device`` is the blocking object in a device worker's process: a phone, an emulator, a browser page. ``DeviceLease`` is
what an episode on the runner's event loop holds: the same calls, awaitable, sent to the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from slime_plugins.rollout_buffer.types import Image


class Action(Protocol):
    """The part of an action that the pool uses. Each kind of device has its own class of actions."""

    @property
    def kind(self) -> str:
        """The name of the action, for messages."""
        ...

    @property
    def duration_s(self) -> float | None:
        """Duration of the action itself, in addition to the time limit of any action."""
        ...


ActionT_contra = TypeVar("ActionT_contra", contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What the agent observes after a reset or a step.

    ``screenshot`` is resized under the pixel limit and encoded; the engine receives exactly these bytes, and they are
    stored and trained on. ``screen_width`` and ``screen_height`` are in the device's own pixels, as the points of
    actions are. ``goal`` is the task in words. ``step_budget`` is the task's own limit of actions, None if it has none.
    ``note`` is an error message for the agent about its last action (text that could not be typed, an unknown app);
    empty without an error. ``elements`` is a text description of the screen, one line per element; empty if the device
    has none. ``done`` is True once the task has ended by itself: later actions change nothing. ``details`` are further
    facts by name, such as ``not_restored``.
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
        """Sets up the task from a clean state and returns the first observation.

        Raises:
            EnvironmentSetupError: there is no such task, or it cannot be set up.
            DeviceError: the device does not answer.
        """
        ...

    def step(self, action: ActionT_contra) -> Observation:
        """Performs the action and returns the settled screen. Impossible actions are reported in ``note``."""
        ...

    def score(self) -> float:
        """Returns the task's success in [0, 1], read from the device's state before a reset.

        A kind of device with another range declares it in its generator and in its conformance test.
        """
        ...

    def health(self) -> Mapping[str, str]:
        """Returns short facts about the device.

        The fact ``capabilities`` (names separated by spaces) limits the device to tasks that need no other
        capabilities; without this fact the device gets any task.

        Raises:
            DeviceError: the device is not usable.
        """
        ...

    def close(self) -> None:
        """Stops everything that the device started; a second call does nothing."""
        ...


@runtime_checkable
class ReportsLoss(Protocol):
    """A ``Device`` that detects its own loss between two calls: its episode fails without waiting for the next call."""

    def lost(self) -> str:
        """Returns why the device is unusable, "" while it works. Fast; may run during another call."""
        ...


class DeviceLease(Protocol[ActionT_contra]):
    """A device leased to one episode. Awaitable form of ``Device``; leaving the context returns it to the pool."""

    @property
    def device_id(self) -> str:
        """The pool's name of the device, for logs and counters."""
        ...

    async def reset(self, task_name: str, params_idx: int) -> Observation: ...

    async def step(self, action: ActionT_contra) -> Observation: ...

    async def score(self) -> float: ...
