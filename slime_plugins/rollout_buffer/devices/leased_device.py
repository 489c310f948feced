"""A device in the hands of one episode: deadlines on every call, and a report of how it went when it is given back."""

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
DIED = "died"
_MAX_ERROR = 500
_WATCH_S = 120.0
"""Each lent device costs its runner one call in so many seconds: with 256 of them, two a second."""

_Result = TypeVar("_Result")


class DeviceCalls(Protocol):
    """A device worker from afar. Calls carry the lease they are made under, and raise ``EpisodeError`` only."""

    async def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``."""
        ...

    async def step(self, lease_id: int, action: Action) -> Observation:
        """As ``Device.step``."""
        ...

    async def score(self, lease_id: int) -> float:
        """As ``Device.score``."""
        ...

    async def lost(self, lease_id: int, wait_s: float) -> str:
        """Returns why the device is gone as soon as it is, "" after ``wait_s``."""
        ...


def device_died(message: str) -> DeviceError:
    """Returns the error of a worker that is gone, which tells the pool to replace it."""
    return DeviceError(message, {"fault": DIED})


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReport:
    """What happened on a device during one lease.

    ``called`` is false when nothing was asked of the device; ``fault`` is how the device failed, None if it did not,
    and ``error`` the same in words.
    """

    called: bool = True
    fault: str | None = None
    error: str = ""
    failures: Mapping[str, int] = field(default_factory=dict)
    reset_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    held_s: float = 0.0


class LeasedDevice:
    """The ``DeviceLease`` of both pools. Leaving its context gives the device back at once, without waiting.

    A device that dies, or is lost to another, ends the context at once with a ``DeviceError``, whatever the episode
    waits for; without a context the next call raises it.
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
        self._lost: DeviceError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancels_before = 0
        self._interrupted = False
        self._called = False
        self._fault: str | None = None
        self._error = ""
        self._failures: Counter[str] = Counter()
        self._reset_s: list[float] = []
        self._step_s: list[float] = []
        self._since = time.monotonic()

    @property
    def device_id(self) -> str:
        """The pool's name for the device."""
        return self._device_id

    async def __aenter__(self) -> LeasedDevice:
        self._task = asyncio.current_task()
        self._cancels_before = self._task.cancelling() if self._task else 0
        if self._lost is not None:
            self._interrupt()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()
        why, self._task = self._interruption(), None
        if why is not None and isinstance(error, asyncio.CancelledError):
            raise why from error
        if why is not None:  # it has come to its end by itself, before the interruption came through
            await _swallow_cancellation()

    def give_back(self) -> None:
        """Ends the lease, for those who cannot hold it as a context; a second call does nothing."""
        give_back, self._give_back = self._give_back, _nothing_left
        give_back(self)

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``; a device that takes longer than ``reset_timeout_s`` counts as hung."""
        start = time.monotonic()
        observation = await self._within(
            self._settings.reset_timeout_s,
            f"setting up {task_name}",
            lambda: self._calls.reset(self.lease_id, task_name, params_idx),
        )
        self._reset_s.append(time.monotonic() - start)
        return observation

    async def step(self, action: Action) -> Observation:
        """As ``Device.step``; a device that takes longer than ``step_timeout_s`` counts as hung."""
        start = time.monotonic()
        observation = await self._within(
            self._settings.step_timeout_s + (action.duration_s or 0.0),
            f"the action {action.kind}",
            lambda: self._calls.step(self.lease_id, action),
        )
        self._step_s.append(time.monotonic() - start)
        return observation

    async def score(self) -> float:
        """As ``Device.score``; a device that takes longer than ``score_timeout_s`` counts as hung."""
        return await self._within(
            self._settings.score_timeout_s, "reading the score", lambda: self._calls.score(self.lease_id)
        )

    def mark_lost(self) -> None:
        """Says that the pool took the device back, because this runner was silent."""
        self._lose(DeviceError(f"the lease of {self._device_id} ran out: its runner was silent for too long"))

    async def watch(self) -> None:
        """Returns when the device is gone; its episode has been told then. For the pool to run beside the episode."""
        try:
            while not (why := await self._calls.lost(self.lease_id, _WATCH_S)):
                pass
            gone = device_died(f"{self._device_id} is gone: {why}")
        except DeviceError as error:
            gone = error
        self._lose(gone)

    def report(self) -> LeaseReport:
        """Returns what happened so far."""
        return LeaseReport(
            called=self._called,
            fault=self._fault,
            error=self._error,
            failures=dict(self._failures),
            reset_s=tuple(self._reset_s),
            step_s=tuple(self._step_s),
            held_s=time.monotonic() - self._since,
        )

    async def _within(self, deadline_s: float, doing: str, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Makes the call; turns its deadline and the loss of the lease into a ``DeviceError``, and notes failures."""
        if self._lost is not None:
            raise self._lost
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

    def _lose(self, why: DeviceError) -> None:
        if self._lost is not None:
            return
        self._lost = why
        if self._fault is None:
            self._note(why)
        else:  # a call has told of it already, in its own words
            self._fault = str(why.detail.get("fault", self._fault))
        self._interrupt()

    def _interrupt(self) -> None:
        """Ends what the episode waits for; whatever of ours it waits in turns that into the loss."""
        if self._task is not None:
            self._interrupted = True
            self._task.cancel()

    def _interruption(self) -> DeviceError | None:
        """Takes our interruption back and returns its reason; None if there was none, or others cancelled as well."""
        if self._task is None or not self._interrupted:
            return None
        self._interrupted = False
        return self._lost if self._task.uncancel() <= self._cancels_before else None

    def _note(self, error: EpisodeError) -> None:
        self._failures[str(error.detail.get("fault") or error.code)] += 1
        if isinstance(error, DeviceError):
            self._fault = str(error.detail.get("fault", "error"))
            self._error = error.message[:_MAX_ERROR]


async def _swallow_cancellation() -> None:
    """Takes up a cancellation that is on its way to this task."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


def _nothing_left(_device: LeasedDevice) -> None:
    """What a lease that has ended gives back."""
