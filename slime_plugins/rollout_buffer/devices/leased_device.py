"""A device leased to one episode. Every call has a deadline, and the end of the lease sends a report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from slime_plugins.rollout_buffer.devices.interface import Action, Observation
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.errors import DeviceError, EpisodeError

HUNG = "hung"
"""The fault of a device that did not finish a call within its time limit."""
DIED = "died"
"""The fault of a device that was lost together with its worker, or detected its own loss."""
NOT_RESTORED = "not_restored"
"""The fault of a device that could not restore the state with which every episode begins.

It is also a key in the details of a reset's observation: the device plays on although the parts named there differ.
"""
_MAX_ERROR_CHARACTERS = 500
_LOSS_CALL_S = 120.0
"""Duration of one ``lost`` call; with 256 devices a runner makes two such calls a second."""

_Result = TypeVar("_Result")


class DeviceCalls(Protocol):
    """Calls to a remote device worker. They carry the lease id, and raise ``EpisodeError`` only."""

    async def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation: ...

    async def step(self, lease_id: int, action: Action) -> Observation: ...

    async def score(self, lease_id: int) -> float: ...

    async def lost(self, lease_id: int, wait_s: float) -> str:
        """Returns the reason as soon as the device is lost; "" if it is not lost within ``wait_s``."""
        ...


def device_died(message: str) -> DeviceError:
    """Returns the error of a lost worker, after which the pool replaces it."""
    return DeviceError(message, {"fault": DIED})


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReport:
    """Report of one lease.

    ``called`` is False if the device was not called. ``fault`` is the kind of the device's last failure, None without a
    failure, and ``error`` the message of that failure. ``failures`` counts all failures by kind. Times are in seconds.
    """

    called: bool = True
    fault: str | None = None
    error: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)
    reset_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    held_s: float = 0.0


class LeasedDevice:
    """The ``DeviceLease`` of both pools. Leaving its context returns the device at once, without waiting.

    If the device dies or the lease is lost, the context ends at once with a ``DeviceError``, whatever the episode
    awaits; outside of a context the next call raises the error.
    """

    def __init__(
        self,
        *,
        lease_id: int,
        device_id: str,
        calls: DeviceCalls,
        settings: DevicePoolSettings,
        give_back: Callable[[LeasedDevice], None],
    ) -> None:
        self.lease_id = lease_id
        self._device_id = device_id
        self._calls = calls
        self._settings = settings
        self._give_back = give_back
        self._loss: DeviceError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancellations_before = 0
        self._interrupted = False
        self._called = False
        self._fault: str | None = None
        self._error = ""
        self._failures: Counter[str] = Counter()
        self._reset_s: list[float] = []
        self._step_s: list[float] = []
        self._leased_at = time.monotonic()

    @property
    def device_id(self) -> str:
        return self._device_id

    async def __aenter__(self) -> LeasedDevice:
        self._task = asyncio.current_task()
        self._cancellations_before = self._task.cancelling() if self._task else 0
        if self._loss is not None:
            self._interrupt()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()
        why, self._task = self._interruption(), None
        if why is not None and isinstance(error, asyncio.CancelledError):
            raise why from error
        if why is not None:  # the episode ended by itself before the interruption arrived
            await _swallow_cancellation()

    def give_back(self) -> None:
        """Ends the lease, for callers without a context; a second call does nothing."""
        give_back, self._give_back = self._give_back, _already_given_back
        give_back(self)

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``; after ``reset_timeout_s`` the device counts as hung."""
        start = time.monotonic()
        observation = await self._within(
            self._settings.reset_timeout_s,
            f"setting up {task_name}",
            lambda: self._calls.reset(self.lease_id, task_name, params_idx),
        )
        self._reset_s.append(time.monotonic() - start)
        if observation.details.get(NOT_RESTORED):  # counted only: the device plays on
            self._failures[NOT_RESTORED] += 1
        return observation

    async def step(self, action: Action) -> Observation:
        """As ``Device.step``; after ``step_timeout_s`` plus the action's duration the device counts as hung."""
        start = time.monotonic()
        observation = await self._within(
            self._settings.step_timeout_s + (action.duration_s or 0.0),
            f"the action {action.kind}",
            lambda: self._calls.step(self.lease_id, action),
        )
        self._step_s.append(time.monotonic() - start)
        return observation

    async def score(self) -> float:
        """As ``Device.score``; after ``score_timeout_s`` the device counts as hung."""
        return await self._within(
            self._settings.score_timeout_s, "reading the score", lambda: self._calls.score(self.lease_id)
        )

    def mark_lost(self) -> None:
        """Fails the episode: the pool took the device back because this runner did not renew its lease."""
        self._lose(DeviceError(f"the lease of {self._device_id} expired: its runner did not renew it in time"))

    async def watch(self) -> None:
        """Waits for the loss of the device, then interrupts its episode. The pool runs it during the lease."""
        try:
            while not (why := await self._calls.lost(self.lease_id, _LOSS_CALL_S)):
                pass
            loss = device_died(f"{self._device_id} is gone: {why}")
        except DeviceError as error:
            loss = error
        self._lose(loss)

    def report(self) -> LeaseReport:
        """Returns the report of the lease up to now."""
        return LeaseReport(
            called=self._called,
            fault=self._fault,
            error=self._error,
            failures=dict(self._failures),
            reset_s=tuple(self._reset_s),
            step_s=tuple(self._step_s),
            held_s=time.monotonic() - self._leased_at,
        )

    async def _within(self, deadline_s: float, doing: str, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Makes the call; converts a timeout and the loss of the lease into a ``DeviceError``, and records failures."""
        if self._loss is not None:
            raise self._loss
        try:
            self._called = True
            async with asyncio.timeout(deadline_s):
                return await call()
        except TimeoutError as timeout:
            hung = DeviceError(f"{self._device_id} did not finish {doing} within {deadline_s:g} s", {"fault": HUNG})
            self._note(hung)
            raise hung from timeout
        except asyncio.CancelledError:
            why = self._interruption()
            if why is not None:
                raise why from None
            raise
        except EpisodeError as error:
            self._note(error)
            raise

    def _lose(self, loss: DeviceError) -> None:
        if self._loss is not None:
            return
        self._loss = loss
        if self._fault is None:
            self._note(loss)
        else:  # a failed call is counted already: the loss only replaces the kind of its fault
            self._fault = str(loss.detail.get("fault", self._fault))
        self._interrupt()

    def _interrupt(self) -> None:
        """Cancels the episode's current wait; the cancelled call or context raises the loss instead."""
        if self._task is not None:
            self._interrupted = True
            self._task.cancel()

    def _interruption(self) -> DeviceError | None:
        """Withdraws the cancellation by ``_interrupt`` and returns its reason.

        Returns None if there was none, or if others have cancelled the task as well.
        """
        if self._task is None or not self._interrupted:
            return None
        self._interrupted = False
        return self._loss if self._task.uncancel() <= self._cancellations_before else None

    def _note(self, error: EpisodeError) -> None:
        self._failures[str(error.detail.get("fault") or error.code)] += 1
        if isinstance(error, DeviceError):
            self._fault = str(error.detail.get("fault", "error"))
            self._error = error.message[:_MAX_ERROR_CHARACTERS]


async def _swallow_cancellation() -> None:
    """Consumes a pending cancellation of this task."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


def _already_given_back(_device: LeasedDevice) -> None:
    """Stands in for the pool's callback after the lease has ended: a second return does nothing."""
