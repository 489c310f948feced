"""The manager of all devices of a pool: boots, leases and checks them, and replaces failed ones.

One manager per Ray cluster (a detached actor) or per process (the local pool). It does not import Ray: its creator
passes a ``Launcher``. All code runs on one event loop and never blocks it.

    preparing ──▶ booting ──▶ ready ──▶ leased ──▶ checking ──▶ ready
       ▲                                │ failed repeatedly ──▶ quarantined ──▶ checking
       │                                │ hung, died, failed again, made under other settings
       └────────────────────────────────┴ old ──▶ recycling ──▶ ready

``health_policy`` decides what a device needs, ``boot_schedule`` when it boots, ``fair_share`` which runner gets it, and
``lease_table`` holds the leases. In addition to ``num_workers`` devices, ``spare_devices`` are booted; at most
``num_workers`` are leased at once, so that spares cover devices under repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugins.rollout_buffer.devices.boot_schedule import BootSchedule, retry_pause_s
from slime_plugins.rollout_buffer.devices.counters import DeviceCounters
from slime_plugins.rollout_buffer.devices.fair_share import ASKS_AGAIN_WITHIN_S, Claimant, FairShare, Purpose
from slime_plugins.rollout_buffer.devices.health_policy import (
    DeviceState,
    HealthAction,
    HealthPolicy,
    HealthRecord,
    may_quarantine,
    may_recycle,
)
from slime_plugins.rollout_buffer.devices.kinds import is_misconfigured
from slime_plugins.rollout_buffer.devices.lease_table import Lease, LeaseTable
from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport
from slime_plugins.rollout_buffer.devices.settings import DEFAULT_LEASE_TIMEOUT_S, DevicePoolSettings
from slime_plugins.rollout_buffer.errors import DeviceError

logger = logging.getLogger(__name__)

LEASE_EXPIRED = "lease_expired"
BOOT_FAILED = "boot_failed"


class Worker(Protocol):
    """One device worker, as the manager uses it."""

    @property
    def calls(self) -> Any:
        """The object through which an episode calls the device; the manager sends it to the runner."""
        ...

    async def prepare(self) -> None:
        """Prepares the device's files on its host; each step of it has its own time limit."""
        ...

    async def boot(self) -> str:
        """Boots the device until it can be used, and returns where it runs, as text."""
        ...

    async def check_health(self) -> frozenset[str] | None:
        """Waits for the calls made so far, and returns the device's capabilities, None for all.

        Raises:
            EpisodeError: the device is not usable, or the worker is gone.
        """
        ...

    def kill(self) -> None:
        """Kills the worker and its device at once."""
        ...


Launcher = Callable[[DevicePoolSettings, int, int], Worker]
"""Starts a worker for (settings, index of the device, number of earlier workers). Returns at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """A device leased to a runner."""

    lease_id: int
    device_id: str
    calls: Any


@dataclass(kw_only=True, slots=True)
class _ManagedDevice:
    """A device of the pool: its name is constant while workers are replaced."""

    index: int
    settings: DevicePoolSettings
    worker: Worker | None = None
    workers_started: int = 0
    state: DeviceState = DeviceState.BOOTING
    health: HealthRecord = field(default_factory=HealthRecord)
    failed_boots: int = 0
    place: str = ""
    last_error: str = ""
    capabilities: frozenset[str] | None = None
    is_examined: bool = False
    is_recycling: bool = False
    """True while the device gets a worker in place of one that was recycled because of its age."""
    counters: DeviceCounters = field(default_factory=DeviceCounters)

    @property
    def device_id(self) -> str:
        return f"device-{self.index}"


@dataclass(kw_only=True, slots=True)
class _Waiter:
    """A runner's pending request for devices."""

    wanted: int
    granted: list[Grant]
    answer: asyncio.Future[list[Grant]]


class DeviceManager:
    """Leases devices to runners in fair shares; a runner that stops renewing loses its leases.

    ``launch`` starts workers, ``clock`` returns monotonic seconds. ``name`` is the name of the pool.
    """

    def __init__(self, launch: Launcher, clock: Callable[[], float] = time.monotonic, *, name: str = "local") -> None:
        self._name = name
        self._launch = launch
        self._clock = clock
        self._settings: DevicePoolSettings | None = None
        # Ids start at the wall clock, so that they also grow across restarts of the manager.
        self._table = LeaseTable(lease_timeout_s=DEFAULT_LEASE_TIMEOUT_S, first_lease_id=time.time_ns())
        self._devices: dict[str, _ManagedDevice] = {}
        self._waiters: dict[Claimant, _Waiter] = {}
        self._fair_share = FairShare()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, after each boot or failed boot."""
        self._outdated = asyncio.Event()
        """Set, and replaced by a new event, when the settings change."""
        self._boot_now = asyncio.Event()
        """Set, and replaced by a new event, to end the pauses before further boots."""
        self._boot_turns = asyncio.Semaphore(1)
        self._boots = BootSchedule(clock())
        self._progress = 0
        """Number of boots that began, and of preparations and boots that succeeded: while it grows, runners wait."""
        self._reservation_timer: asyncio.TimerHandle | None = None

    # ---- calls of runners --------------------------------------------------------------------------------------------

    async def configure(self, settings: Mapping[str, Any], *, new_start: bool = False) -> None:
        """Applies the settings of a host: starts missing devices, replaces outdated ones, removes surplus ones.

        Leased devices are changed after their return. Repeated settings change nothing, except that a new start of a
        runner boots the devices again if all of them are broken: the host may have been repaired.
        """
        wanted = DevicePoolSettings.model_validate(settings)
        if wanted == self._settings:
            if new_start and self._is_unrecoverable():
                self._reset_failed_boots()
            return
        if self._settings is None:
            self._spawn(self._expire_leases())
        self._settings = wanted
        self._table.lease_timeout_s = wanted.lease_timeout_s
        self._fair_share.evaluation_share = wanted.evaluation_share
        self._boot_turns = asyncio.Semaphore(wanted.boots_at_once)
        self._reset_failed_boots()
        self._outdated.set()
        self._outdated = asyncio.Event()
        self._drop_surplus_and_outdated()
        self._add_missing()

    async def ready(self, wait_s: float) -> str:
        """Returns "" once a device can be used; the reason if none can after ``wait_s``, or once all are broken."""
        deadline = self._clock() + wait_s
        while not any(device.worker for device in self._devices.values()):
            if self._is_unrecoverable() or not await self._change_before(deadline):
                return self._why_no_device()
        return ""

    async def acquire(
        self, owner: str, purpose: Purpose, wanted: int, wait_s: float, needs: frozenset[str] = frozenset()
    ) -> list[Grant]:
        """Leases up to ``wanted`` devices that have these capabilities; waits up to ``wait_s`` until one is free.

        May return no device. An owner has one such call per purpose and needs at a time: a second call ends the first,
        whose caller is gone.

        Raises:
            DeviceError: the manager has no settings since its start, perhaps after a crash.
        """
        self._current_settings()  # raises before the first ``configure``
        claimant = Claimant(owner=owner, purpose=purpose, needs=needs)
        waiter = self._enqueue(claimant, wanted)
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(waiter.answer)
        except TimeoutError:
            return waiter.answer.result() if waiter.answer.done() else []
        finally:
            if self._waiters.get(claimant) is waiter:
                self._dequeue(claimant)

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]:
        """Extends the owner's leases; returns the ids of leases that it has lost."""
        return self._table.renew(owner, lease_ids, self._clock())

    async def release(self, lease_id: int, report: LeaseReport) -> None:
        """Ends a lease. An expired lease is ignored: its device may be leased to another episode."""
        lease = self._table.take_back(lease_id)
        if lease is not None:
            self._fair_share.expect(lease.holder, 1, self._clock())
            device = self._devices[lease.device_id]
            device.counters.add(report)
            device.health = device.health.after(report)
            device.last_error = report.error or device.last_error
            self._check_returned(device)

    async def leave(self, owner: str) -> None:
        """Removes a runner: cancels its requests and takes its leases back.

        A request may still be pending although its runner is gone.
        """
        for claimant in [each for each in self._waiters if each.owner == owner]:
            self._answer(claimant)
        for lease in self._table.take_back_all_of(owner):
            self._check_returned(self._devices[lease.device_id])

    async def snapshot(self) -> dict[str, Any]:
        """Returns the pool's state: its name, waiting runners, and every device with its state and counters."""
        holders = self._table.holders()
        return {
            "pool": self._name,
            "may_be_lent": self._current_settings().num_workers,
            "runners_waiting": self._fair_share.waiting(),
            "progress": self._progress,
            "unrecoverable": self._is_unrecoverable(),
            "devices": [
                {
                    "device_id": device.device_id,
                    "state": device.state.value,
                    "leased_by": holders.get(device.device_id),
                    "workers": device.workers_started,
                    "place": device.place,
                    "last_error": device.last_error,
                    "is_examined": device.is_examined,
                    "capabilities": None if device.capabilities is None else sorted(device.capabilities),
                }
                | device.counters.as_dict()
                for device in self._devices.values()
            ],
        }

    async def close(self) -> None:
        """Kills all workers. The manager cannot be used afterwards."""
        if self._reservation_timer is not None:
            self._reservation_timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for device in self._devices.values():
            self._kill(device)

    # ---- leases ------------------------------------------------------------------------------------------------------

    def _enqueue(self, claimant: Claimant, wanted: int) -> _Waiter:
        earlier = self._waiters.pop(claimant, None)
        if earlier is not None and not earlier.answer.done():
            earlier.answer.set_result([])
        waiter = _Waiter(wanted=wanted, granted=[], answer=asyncio.get_running_loop().create_future())
        self._waiters[claimant] = waiter
        self._fair_share.join(claimant, self._clock())
        return waiter

    def _dequeue(self, claimant: Claimant) -> None:
        waiter = self._waiters.pop(claimant)
        self._fair_share.leave(claimant, self._clock())
        still_wanted = min(waiter.wanted, self._current_settings().num_workers) - len(waiter.granted)
        self._fair_share.expect(claimant, max(0, still_wanted), self._clock())

    def _serve(self) -> None:
        """Leases free devices to waiting runners, one at a time; at most ``num_workers`` devices are leased.

        A kind of device is a set of capabilities.
        """
        now, reserved = self._clock(), Counter[Claimant]()
        free = dict(self._table.free_by_kind())
        while self._table.lent + reserved.total() < self._current_settings().num_workers:
            offers = {
                kind: claimant
                for kind, count in free.items()
                if count
                and (claimant := self._fair_share.next(self._table.held(kind) + reserved, now, kind)) is not None
            }
            if not offers:
                break
            # With spares some devices stay free. Without this choice they could always be the devices of one kind, and
            # the runners that need that kind would wait forever.
            kind = min(offers, key=lambda kind: self._fair_share.last_served(offers[kind], now))
            free[kind] -= 1
            claimant = offers[kind]
            if claimant.is_reservation:
                reserved[claimant] += 1
                self._serve_soon()
            elif lease := self._table.lend(claimant, now, kind):
                self._fair_share.serve(claimant, now, offered=[each for each in offers if offers[each] == claimant])
                self._grant(self._waiters[claimant], lease)
        for claimant, waiter in list(self._waiters.items()):
            if waiter.granted:
                self._answer(claimant)

    def _serve_soon(self) -> None:
        """Serves again after ``ASKS_AGAIN_WITHIN_S``, in case the runner of a reservation does not ask by then."""
        if self._reservation_timer is None:
            loop = asyncio.get_running_loop()
            self._reservation_timer = loop.call_later(ASKS_AGAIN_WITHIN_S, self._serve_reserved)

    def _serve_reserved(self) -> None:
        self._reservation_timer = None
        self._serve()

    def _grant(self, waiter: _Waiter, lease: Lease) -> None:
        device = self._devices[lease.device_id]
        if device.worker is None:
            raise AssertionError(f"{lease.device_id} was free without a worker")
        device.state = DeviceState.LEASED
        waiter.granted.append(Grant(lease_id=lease.lease_id, device_id=lease.device_id, calls=device.worker.calls))
        if len(waiter.granted) >= waiter.wanted:
            self._answer(lease.holder)

    def _answer(self, claimant: Claimant) -> None:
        waiter = self._waiters[claimant]
        self._dequeue(claimant)
        waiter.answer.set_result(waiter.granted)

    async def _expire_leases(self) -> None:
        """Takes back expired leases, in a loop."""
        while True:
            await asyncio.sleep(self._table.lease_timeout_s / 4)
            for lease in self._table.take_back_expired(self._clock()):
                device = self._devices[lease.device_id]
                logger.warning("%s stopped renewing its lease and loses %s", lease.holder.owner, lease.device_id)
                device.counters.failures[LEASE_EXPIRED] += 1
                self._check_returned(device)

    def _check_returned(self, device: _ManagedDevice) -> None:
        """Starts the check of a returned device; a waiting runner may get a spare device at once."""
        device.state = DeviceState.CHECKING
        self._spawn(self._reconcile(device))
        self._serve()

    # ---- health ------------------------------------------------------------------------------------------------------

    def _current_settings(self) -> DevicePoolSettings:
        if self._settings is None:
            raise DeviceError("the device manager has just started and has no settings yet")
        return self._settings

    def _devices_wanted(self) -> int:
        return self._current_settings().num_workers + self._current_settings().spare_devices

    def _health_policy(self) -> HealthPolicy:
        settings = self._current_settings()
        return HealthPolicy(
            max_consecutive_faults=settings.max_consecutive_faults,
            quarantine_s=settings.quarantine_s,
            recycle_after_episodes=settings.recycle_after_episodes,
        )

    def _drop_surplus_and_outdated(self) -> None:
        for device in list(self._devices.values()):
            if self._table.set_aside(device.device_id):
                self._spawn(self._reconcile(device))

    def _add_missing(self) -> None:
        for index in range(self._devices_wanted()):
            device = _ManagedDevice(index=index, settings=self._current_settings())
            if device.device_id not in self._devices:
                self._devices[device.device_id] = device
                self._spawn(self._reconcile(device))

    async def _reconcile(self, device: _ManagedDevice) -> None:
        """Makes a returned, set aside or new device ready; removes it if it is surplus."""
        while device.index < self._devices_wanted():
            action = self._next_action(device)
            if action is HealthAction.QUARANTINE:
                device.counters.quarantines += 1
                await self._quarantine(device, self._current_settings().quarantine_s)
                device.health = device.health.after_quarantine()
                action = HealthAction.LEND
            if action is HealthAction.LEND and await self._is_well(device):
                self._make_ready(device)
                return
            await self._retire(device, action)
            await self._boot(device)
        self._kill(device)
        del self._devices[device.device_id]

    def _next_action(self, device: _ManagedDevice) -> HealthAction:
        if device.worker is None or device.settings != self._settings:
            return HealthAction.REPLACE
        recycling = sum(each.is_recycling for each in self._devices.values())
        return self._health_policy().decide(
            device.health,
            may_quarantine=self._may_quarantine(),
            may_recycle=may_recycle(recycling, self._current_settings().spare_devices),
        )

    def _may_quarantine(self) -> bool:
        quarantined = sum(device.state is DeviceState.QUARANTINED for device in self._devices.values())
        return may_quarantine(quarantined, len(self._devices))

    def _make_ready(self, device: _ManagedDevice) -> None:
        device.state = DeviceState.READY
        self._table.add(device.device_id, device.capabilities)
        self._serve()

    async def _is_well(self, device: _ManagedDevice) -> bool:
        """Returns True if the worker is healthy; first waits for a cancelled episode's last call, if it still runs."""
        if device.worker is None or device.settings != self._settings:
            return False
        device.state = DeviceState.CHECKING
        try:
            async with asyncio.timeout(self._current_settings().reset_timeout_s):
                device.capabilities = await device.worker.check_health()
                device.is_examined = True
        except Exception as error:  # noqa: BLE001 - any failure of a worker leads to a new worker
            device.last_error = str(error) or type(error).__name__
            return False
        return device.settings == self._settings

    async def _retire(self, device: _ManagedDevice, action: HealthAction) -> None:
        """Kills the worker; if the worker before it failed, too, the device is quarantined before the next boot."""
        if device.worker is None:
            return
        has_failed = device.settings == self._settings and action is not HealthAction.RECYCLE
        quarantine_s = 0.0
        if has_failed and self._may_quarantine():
            quarantine_s = self._health_policy().quarantine_before_new_worker_s(device.health)
        self._kill(device)
        device.health = device.health.with_new_worker(after_failure=has_failed)
        if action is HealthAction.RECYCLE:
            device.is_recycling = True
            device.counters.recyclings += 1
            logger.info("%s is recycled", device.device_id)
            return
        device.counters.replacements += has_failed
        why = device.last_error if has_failed else "the settings have changed"
        logger.warning("%s gets a new worker: %s", device.device_id, why)
        if quarantine_s:
            device.counters.quarantines += 1
            await self._quarantine(device, quarantine_s)

    async def _quarantine(self, device: _ManagedDevice, seconds: float) -> None:
        device.state = DeviceState.QUARANTINED
        logger.warning("%s is quarantined for %g s: %s", device.device_id, seconds, device.last_error)
        await self._pause(seconds)

    async def _boot(self, device: _ManagedDevice) -> None:
        """Starts workers until one has booted, with growing pauses; stops when the device is surplus."""
        while device.index < self._devices_wanted():
            device.settings = self._current_settings()
            device.state = DeviceState.RECYCLING if device.is_recycling else DeviceState.BOOTING
            worker = self._launch(device.settings, device.index, device.workers_started)
            device.workers_started += 1
            is_up = False
            try:
                is_up = await self._is_prepared(device, worker) and await self._boots_in_turn(device, worker)
            finally:
                if not is_up:
                    worker.kill()
            if is_up:
                device.worker, device.failed_boots, device.is_recycling = worker, 0, False
            self._notify()
            if is_up:
                return
            if device.settings == self._settings and device.failed_boots:
                await self._pause(retry_pause_s(device.failed_boots, device.settings), self._boot_now)

    async def _is_prepared(self, device: _ManagedDevice, worker: Worker) -> bool:
        """Waits until the device's files are prepared; returns False as ``_finishes`` does."""
        if not device.settings.prepare:
            return True
        state, device.state = device.state, DeviceState.PREPARING
        prepared = await self._finishes(device, worker.prepare(), limit_s=None)
        device.state = state
        return prepared

    async def _boots_in_turn(self, device: _ManagedDevice, worker: Worker) -> bool:
        """Boots the worker within the limit of concurrent boots; returns False as ``_finishes`` does or if outdated."""

        async def boot() -> None:
            device.place = await worker.boot()

        async with self._boot_turns:
            await self._pause(self._boots.take_turn(self._clock(), self._current_settings().boot_stagger_s))
            if device.settings != self._settings:
                return False
            self._progress += 1
            return await self._finishes(device, boot(), limit_s=device.settings.boot_timeout_s)

    async def _finishes(
        self, device: _ManagedDevice, step: Coroutine[Any, Any, None], *, limit_s: float | None
    ) -> bool:
        """Waits for a step of the boot; returns False if it fails, times out, or the settings change meanwhile."""
        doing = asyncio.ensure_future(step)
        outdated = asyncio.ensure_future(self._outdated.wait())
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wait({doing, outdated}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
                self._progress += 1
        except Exception as error:  # noqa: BLE001 - any failed boot is recorded, shown to runners, and retried
            self._note_failed_boot(device, error)
            return False
        finally:
            doing.cancel()
            outdated.cancel()
        return doing.done() and not doing.cancelled()

    def _note_failed_boot(self, device: _ManagedDevice, error: Exception) -> None:
        device.last_error = str(error) or f"not up within {device.settings.boot_timeout_s:g} s"
        device.failed_boots += 1
        if is_misconfigured(error):  # retries cannot succeed; they continue in case the host is repaired
            device.failed_boots = max(device.failed_boots, device.settings.boot_attempts)
        device.counters.failures[BOOT_FAILED] += 1
        logger.warning("%s does not boot: %s", device.device_id, device.last_error)

    def _reset_failed_boots(self) -> None:
        """Clears the errors of devices that did not boot, and ends the pauses before their next boots."""
        for device in self._devices.values():
            if device.worker is None:
                device.failed_boots, device.last_error = 0, ""
        self._boot_now.set()
        self._boot_now = asyncio.Event()

    async def _pause(self, seconds: float, until: asyncio.Event | None = None) -> None:
        """Waits ``seconds``, or until the event ``until`` is set; without an event, until the settings change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (until or self._outdated).wait()

    def _kill(self, device: _ManagedDevice) -> None:
        worker, device.worker = device.worker, None
        if worker is not None:
            worker.kill()

    def _is_unrecoverable(self) -> bool:
        return all(device.failed_boots >= device.settings.boot_attempts for device in self._devices.values())

    def _why_no_device(self) -> str:
        errors = sorted({device.last_error for device in self._devices.values() if device.last_error})
        return (
            "; ".join(errors) or "no device came up in time: does a node of the Ray cluster have resources_per_worker?"
        )

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
            logger.error("a task of the device manager failed", exc_info=task.exception())
