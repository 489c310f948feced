"""The keeper of all devices: brings them up, lends them, takes them back, and replaces those that fail.

One registry per Ray cluster (a detached actor) or per process (the local pool). It knows nothing of Ray: whoever makes
it passes a ``Launcher``. Everything here runs on one event loop and never blocks it.

    booting ──▶ free ──▶ lent ──▶ settling ──▶ free
       ▲                             │ hung, died, failed too often, or made under other settings
       └──────────── replaced ◀──────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.held_device import DIED, HUNG, DeviceCounters, LeaseReport
from slime_plugins.rollout_buffer.generator.android_world.leasing import Lease, LeaseTable, next_in_line

__all__ = ["DeviceRegistry", "Grant", "Launcher", "Worker"]

logger = logging.getLogger(__name__)

LEASE_EXPIRED = "lease_expired"
BOOT_FAILED = "boot_failed"
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_HOPELESS_BOOTS = 2


class Worker(Protocol):
    """One device worker, as its registry sees it."""

    @property
    def calls(self) -> Any:
        """What an episode calls the device through; it must survive the way from the registry to the runner."""
        ...

    async def boot(self) -> None:
        """Builds the device; returns when it can be used."""
        ...

    async def settle(self) -> None:
        """Returns when the calls made so far are done; raises when the worker is gone."""
        ...

    def kill(self) -> None:
        """Ends the worker and its device at once, whatever it is doing."""
        ...


Launcher = Callable[[AndroidWorldSettings, int, int], Worker]
"""Starts a worker for (settings, index of the device, how many workers it had before). Returns at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """A device lent to a runner."""

    lease_id: int
    device_id: str
    calls: Any


@dataclass(kw_only=True, slots=True)
class _Slot:
    """The place of one device: its name stays, workers come and go."""

    index: int
    settings: AndroidWorldSettings
    worker: Worker | None = None
    workers_before: int = 0
    consecutive_faults: int = 0
    failed_boots: int = 0
    last_error: str = ""
    counters: DeviceCounters = field(default_factory=DeviceCounters)

    @property
    def device_id(self) -> str:
        return f"device-{self.index}"


@dataclass(kw_only=True, slots=True)
class _Waiter:
    """A runner that asked for devices."""

    wanted: int
    since: float
    granted: list[Grant]
    answer: asyncio.Future[list[Grant]]


class DeviceRegistry:
    """Lends devices to runners, fairly among them; a runner that falls silent loses what it holds.

    ``launch`` starts workers, ``clock`` returns seconds and never goes back.
    """

    def __init__(self, launch: Launcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._launch = launch
        self._clock = clock
        self._settings: AndroidWorldSettings | None = None
        # Starting from the wall clock, ids grow also from one life of the registry to the next.
        self._table = LeaseTable(lease_timeout_s=60.0, first_lease_id=time.time_ns())
        self._slots: dict[str, _Slot] = {}
        self._waiters: dict[str, _Waiter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # ---- what runners call -------------------------------------------------------------------------------------------

    async def configure(self, settings: Mapping[str, Any]) -> None:
        """Takes over a host's settings: starts missing devices, replaces outdated ones, drops surplus ones.

        Devices in use are left alone until they come back. Repeating the same settings changes nothing.
        """
        wanted = AndroidWorldSettings.model_validate(settings).for_devices()
        if wanted == self._settings:
            return
        first_time, self._settings = self._settings is None, wanted
        self._table.lease_timeout_s = wanted.lease_timeout_s
        self._drop_surplus_and_outdated()
        self._add_missing()
        if first_time:
            self._spawn(self._expire_leases())

    async def ready(self, wait_s: float) -> str:
        """Returns "" once a device can be used; after ``wait_s``, or when all fail to boot, the reason why none can."""
        deadline = self._clock() + wait_s
        while not any(slot.worker for slot in self._slots.values()):
            if self._is_hopeless() or not await self._change_before(deadline):
                return self._why_no_device()
        return ""

    async def acquire(self, owner: str, wanted: int, wait_s: float) -> list[Grant]:
        """Lends up to ``wanted`` devices; waits until at least one is free, at most ``wait_s``. May return none.

        An owner has one such call at a time: a second one ends the first, whose reply nobody awaits any more.

        Raises:
            DeviceError: nobody has configured the registry since it was started, perhaps after a crash.
        """
        self._current()
        waiter = self._enqueue(owner, wanted)
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(waiter.answer)
        except TimeoutError:
            return waiter.answer.result() if waiter.answer.done() else []
        finally:
            if self._waiters.get(owner) is waiter:
                del self._waiters[owner]

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]:
        """Extends the owner's leases; returns those that it has lost."""
        return self._table.renew(owner, lease_ids, self._clock())

    async def release(self, lease_id: int, report: LeaseReport) -> None:
        """Takes a device back. A lease that had run out before is ignored: its device is somebody else's by now."""
        lease = self._table.take_back(lease_id)
        if lease is not None:
            slot = self._slots[lease.device_id]
            slot.counters.add(report)
            self._count_fault(slot, report.fault)
            self._spawn(self._settle(slot, report.fault))

    async def snapshot(self) -> list[dict[str, Any]]:
        """Returns the counters of every device."""
        return [
            {"device_id": slot.device_id, "up": slot.worker is not None, "last_error": slot.last_error}
            | slot.counters.as_dict()
            for slot in self._slots.values()
        ]

    async def close(self) -> None:
        """Ends all workers. A registry is not used again after this."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots.values():
            self._kill(slot)

    # ---- lending -----------------------------------------------------------------------------------------------------

    def _enqueue(self, owner: str, wanted: int) -> _Waiter:
        earlier = self._waiters.pop(owner, None)
        if earlier is not None and not earlier.answer.done():
            earlier.answer.set_result([])
        answer = asyncio.get_running_loop().create_future()
        waiter = _Waiter(wanted=wanted, since=self._clock(), granted=[], answer=answer)
        self._waiters[owner] = waiter
        return waiter

    def _serve(self) -> None:
        """Deals the free devices out among the waiting owners, one at a time."""
        while self._waiters and self._table.free:
            since = {owner: waiter.since for owner, waiter in self._waiters.items()}
            owner = next_in_line(since, {owner: self._table.held_by(owner) for owner in since})
            lease = self._table.lend(owner, self._clock())
            if lease is None:
                break
            self._grant(self._waiters[owner], lease)
        for owner, waiter in list(self._waiters.items()):
            if waiter.granted:
                waiter.answer.set_result(waiter.granted)
                del self._waiters[owner]

    def _grant(self, waiter: _Waiter, lease: Lease) -> None:
        worker = self._slots[lease.device_id].worker
        if worker is None:
            raise AssertionError(f"{lease.device_id} was free without a worker")
        waiter.granted.append(Grant(lease_id=lease.lease_id, device_id=lease.device_id, calls=worker.calls))
        if len(waiter.granted) >= waiter.wanted:
            del self._waiters[lease.owner]
            waiter.answer.set_result(waiter.granted)

    async def _expire_leases(self) -> None:
        """Takes back, for ever, what silent owners hold."""
        while True:
            await asyncio.sleep(self._table.lease_timeout_s / 4)
            for lease in self._table.take_back_expired(self._clock()):
                slot = self._slots[lease.device_id]
                logger.warning("%s fell silent and loses %s", lease.owner, lease.device_id)
                slot.counters.count_failure(LEASE_EXPIRED)
                self._spawn(self._settle(slot, None))

    # ---- taking care of devices --------------------------------------------------------------------------------------

    def _current(self) -> AndroidWorldSettings:
        if self._settings is None:
            raise DeviceError("the device registry has just started and was not told its settings yet")
        return self._settings

    def _drop_surplus_and_outdated(self) -> None:
        for slot in list(self._slots.values()):
            if self._table.set_aside(slot.device_id):
                self._spawn(self._settle(slot, None))

    def _add_missing(self) -> None:
        for index in range(self._current().num_workers):
            slot = _Slot(index=index, settings=self._current())
            if slot.device_id not in self._slots:
                self._slots[slot.device_id] = slot
                self._spawn(self._settle(slot, None))

    def _count_fault(self, slot: _Slot, fault: str | None) -> None:
        slot.consecutive_faults = 0 if fault is None else slot.consecutive_faults + 1

    async def _settle(self, slot: _Slot, fault: str | None) -> None:
        """Makes a device that came back, or is yet to come up, free; replaces or drops it if need be."""
        while slot.index < self._current().num_workers:
            if await self._is_usable(slot, fault):
                self._table.add(slot.device_id)
                self._serve()
                return
            if slot.worker is not None:
                slot.counters.count_replacement()
                self._kill(slot)
            await self._bring_up(slot)
            fault = None
        self._kill(slot)
        del self._slots[slot.device_id]

    async def _is_usable(self, slot: _Slot, fault: str | None) -> bool:
        if fault in (HUNG, DIED) or slot.settings != self._settings or slot.worker is None:
            return False
        if slot.consecutive_faults >= self._current().max_consecutive_faults:
            return False
        try:
            # An episode that was given up may have left a call running; until it is done nobody else gets the device.
            async with asyncio.timeout(self._current().reset_timeout_s):
                await slot.worker.settle()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a worker, the remedy is a new one
            slot.last_error = str(error) or type(error).__name__
            return False
        return slot.settings == self._settings

    async def _bring_up(self, slot: _Slot) -> None:
        """Starts workers until one is up, with growing pauses between failures; gives up once it is surplus."""
        for pause_s in _pauses():
            slot.settings = self._current()
            if slot.index >= slot.settings.num_workers:
                return
            worker = self._launch(slot.settings, slot.index, slot.workers_before)
            slot.workers_before += 1
            if await self._boots(slot, worker):
                slot.worker, slot.consecutive_faults, slot.failed_boots, slot.last_error = worker, 0, 0, ""
                self._notify()
                return
            worker.kill()
            self._notify()
            await asyncio.sleep(pause_s)

    async def _boots(self, slot: _Slot, worker: Worker) -> bool:
        try:
            async with asyncio.timeout(slot.settings.boot_timeout_s):
                await worker.boot()
        except asyncio.CancelledError:
            worker.kill()
            raise
        except Exception as error:  # noqa: BLE001 - any failure to boot is noted, shown to runners, and tried again
            slot.last_error = str(error) or f"not up within {slot.settings.boot_timeout_s:g} s"
            slot.failed_boots += 1
            slot.counters.count_failure(BOOT_FAILED)
            logger.warning("%s does not boot: %s", slot.device_id, slot.last_error)
            return False
        return True

    def _kill(self, slot: _Slot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None:
            worker.kill()

    def _is_hopeless(self) -> bool:
        return all(slot.failed_boots >= _HOPELESS_BOOTS for slot in self._slots.values())

    def _why_no_device(self) -> str:
        errors = sorted({slot.last_error for slot in self._slots.values() if slot.last_error})
        return "; ".join(errors) or "no device came up in time: does the Ray cluster have the resources they ask for?"

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change_before(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the device registry broke", exc_info=task.exception())


def _pauses() -> itertools.chain[float]:
    """Yields 1, 2, 4 … seconds, then a minute for ever."""
    growing = itertools.takewhile(lambda pause: pause < _LONGEST_PAUSE_S, (_FIRST_PAUSE_S * 2**n for n in range(64)))
    return itertools.chain(growing, itertools.repeat(_LONGEST_PAUSE_S))
