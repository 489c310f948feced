"""A device in the hands of one episode: deadlines on every call, and a report of how it went when it is given back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeVar

from slime_plugins.rollout_buffer.errors import DeviceError, EpisodeError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device import Action, Observation

__all__ = ["DIED", "HUNG", "DeviceCalls", "HeldDevice", "LeaseReport", "device_died"]

HUNG = "hung"
DIED = "died"
_LONGEST_ERROR = 500

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


class HeldDevice:
    """The ``DeviceLease`` of both pools. Leaving its context gives the device back at once, without waiting."""

    def __init__(
        self,
        *,
        lease_id: int,
        device_id: str,
        calls: DeviceCalls,
        settings: AndroidWorldSettings,
        give_back: Callable[[HeldDevice], None],
    ) -> None:
        self.lease_id = lease_id
        self._device_id = device_id
        self._calls = calls
        self._settings = settings
        self._give_back = give_back
        self._lost = False
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

    async def __aenter__(self) -> HeldDevice:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_back()

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
        """Says that the pool took the device back: the next call raises instead of being made."""
        self._lost = True

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
        try:
            self._check_not_lost()
            self._called = True
            async with asyncio.timeout(deadline_s):
                return await call()
        except TimeoutError as timeout:
            hung = DeviceError(f"{self._device_id} did not finish {doing} within {deadline_s:g} s", {"fault": HUNG})
            self._note(hung)
            raise hung from timeout
        except EpisodeError as error:
            self._note(error)
            raise

    def _check_not_lost(self) -> None:
        if self._lost:
            raise DeviceError(f"the lease of {self._device_id} ran out: its runner was silent for too long")

    def _note(self, error: EpisodeError) -> None:
        self._failures[str(error.detail.get("fault") or error.code)] += 1
        if isinstance(error, DeviceError):
            self._fault = str(error.detail.get("fault", "error"))
            self._error = error.message[:_LONGEST_ERROR]


def _nothing_left(_device: HeldDevice) -> None:
    """What a lease that has ended gives back."""
