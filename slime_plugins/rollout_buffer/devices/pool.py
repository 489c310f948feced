"""The runner's side of a device pool: waits for devices, renews leases, returns devices.

Independent of the number of waiting episodes, the manager has at most one request of this runner for each purpose and
set of needs, and one renewal, at any time.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slime_plugins.rollout_buffer.devices.capabilities import unplayable
from slime_plugins.rollout_buffer.devices.device_manager import Grant
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.leased_device import DIED, LeasedDevice, LeaseReport
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError, EpisodeError

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_PAUSE_AFTER_ERROR_S = 1.0
_RELEASE_TIMEOUT_S = 10.0
_MAX_NAMES = 8


class DeviceManagerCalls(Protocol):
    """Calls to a ``DeviceManager``. They raise ``DeviceError`` if the manager cannot be reached."""

    async def configure(self, settings: Mapping[str, Any], *, new_start: bool = False) -> None: ...

    async def ready(self, wait_s: float) -> str: ...

    async def acquire(
        self, owner: str, purpose: Purpose, wanted: int, wait_s: float, needs: frozenset[str] = frozenset()
    ) -> list[Grant]: ...

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]: ...

    async def release(self, lease_id: int, report: LeaseReport) -> None: ...

    async def leave(self, owner: str) -> None: ...

    async def snapshot(self) -> dict[str, Any]: ...

    async def close(self) -> None:
        """Disconnects from the manager. Local devices end with it; devices on Ray stay for the next runner."""
        ...


class DevicePool:
    """Leases devices to the episodes of one runner. ``owner`` identifies the runner in the manager and its logs."""

    def __init__(self, manager: DeviceManagerCalls, settings: DevicePoolSettings, *, owner: str) -> None:
        self._manager = manager
        self._settings = settings
        self._owner = f"{owner}-{uuid.uuid4().hex[:8]}"
        self._queues: dict[tuple[Purpose, frozenset[str]], _WaitQueue] = {}
        self._leased: dict[int, LeasedDevice] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        """The renewal of leases and one task per queue; empty while the pool is not started."""
        self._releases: set[asyncio.Task[None]] = set()
        self._unreachable_since: dict[_WaitQueue, float] = {}
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> None:
        """Connects, and returns once a device can be used; does nothing if an earlier call succeeded.

        Raises:
            DeviceError: no device came up in time.
        """
        async with self._starting:
            if self._background:
                return
            if why_not := await self._until_ready():
                raise DeviceError(f"no device came up: {why_not}")
            self._is_closed = False
            self._background = [asyncio.create_task(self._keep_leases())]
            self._background += [asyncio.create_task(self._request_devices(queue)) for queue in self._queues.values()]

    async def _until_ready(self) -> str:
        """Returns "" once a device can be used, or the reason why none can. Waits through a restart of the manager or
        the cluster.

        ``boot_timeout_s`` begins anew with each progress of the manager: a pool that still boots devices is waited for.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.boot_timeout_s
        seen_progress, new_start = -1, True
        while True:
            try:
                await self._manager.configure(self._settings.model_dump(mode="json"), new_start=new_start)
                new_start = False
                why_not = await self._manager.ready(min(max(deadline - now(), 0.0), _LONG_POLL_S))
                snapshot = await self._manager.snapshot() if why_not else {}
                if not why_not or snapshot.get("unrecoverable"):
                    return why_not
                states = Counter(str(device["state"]) for device in snapshot["devices"])
                if snapshot["progress"] != seen_progress or states["preparing"]:
                    seen_progress, deadline = snapshot["progress"], now() + self._settings.boot_timeout_s
                    error_text = _commonest_error(snapshot["devices"])
                    logger.info("waiting for the first device: %s%s", _counts_in_words(states), error_text)
                if now() >= deadline:
                    return why_not
            except DeviceError as error:
                if error.detail.get("fault") != DIED or now() >= deadline:
                    raise
                logger.warning("the devices cannot be reached yet, trying again: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def check_playable(self, tasks: Mapping[str, frozenset[str]]) -> None:
        """Returns once each task, given with its needs, has a device that can play it.

        Raises:
            ConfigError: a task can be played by none of the devices that are up within ``boot_timeout_s``.
            DeviceError: the pool does not answer.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.boot_timeout_s
        while missing := unplayable(tasks, _capabilities(devices := await self.counters())):
            unexamined = [device for device in devices if not device["is_examined"]]
            if not unexamined or now() >= deadline:
                states = Counter(str(device["state"]) for device in unexamined)
                not_up = f"; not up: {_counts_in_words(states)}" if unexamined else ""
                raise ConfigError(f"{_what_is_missing(missing)}{not_up}{_commonest_error(unexamined)}")
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def acquire(self, purpose: Purpose = Purpose.TRAINING, needs: frozenset[str] = frozenset()) -> LeasedDevice:
        """Returns the next free device that has what the task needs, as a context manager that returns it to the pool.

        First come, first served within a purpose and equal needs.

        Raises:
            DeviceError: none became free within ``acquire_timeout_s``, or the pool is closed.
            EnvironmentSetupError: no device of the pool has what the task needs.
        """
        if self._is_closed:
            raise DeviceError("the device pool was closed")
        waiter = self._queue_of(purpose, needs).join()
        try:
            async with asyncio.timeout(self._settings.acquire_timeout_s):
                return await waiter
        except TimeoutError as timeout:
            self._return_unclaimed(waiter)
            seconds = self._settings.acquire_timeout_s
            with_needs = f" with {', '.join(sorted(needs))}" if needs else ""
            raise DeviceError(f"no device{with_needs} became free within {seconds:g} s") from timeout
        except asyncio.CancelledError:
            # A device may have been assigned at the moment of the cancellation.
            self._return_unclaimed(waiter)
            raise

    async def counters(self) -> list[dict[str, Any]]:
        """Returns the counters of each device."""
        return list((await self._manager.snapshot())["devices"])

    async def snapshot(self) -> dict[str, Any]:
        """Returns the pool's state: ``pool``, ``may_be_lent``, waiting runners, ``episodes_waiting`` by purpose, and
        ``devices`` as in ``counters``."""
        waiting = Counter({purpose.value: 0 for purpose in Purpose})
        for queue in self._queues.values():
            waiting[queue.purpose.value] += queue.count()
        return await self._manager.snapshot() | {"episodes_waiting": dict(waiting)}

    async def close(self) -> None:
        """Returns all devices, fails episodes that wait for one, and disconnects; a second call does nothing."""
        self._is_closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        started, self._background = bool(self._background), []
        for queue in self._queues.values():
            queue.fail(DeviceError("the device pool was closed"))
        for device in list(self._leased.values()):
            self._give_back(device)
        if self._releases:
            await asyncio.wait(self._releases, timeout=_RELEASE_TIMEOUT_S)
        if started:
            await self._leave()
        await self._manager.close()

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def _queue_of(self, purpose: Purpose, needs: frozenset[str]) -> _WaitQueue:
        if (purpose, needs) not in self._queues:
            queue = self._queues[purpose, needs] = _WaitQueue(purpose, needs)
            if self._background:
                self._background.append(asyncio.create_task(self._request_devices(queue)))
        return self._queues[purpose, needs]

    async def _request_devices(self, queue: _WaitQueue) -> None:
        """Requests as many devices as episodes wait for, in a loop."""
        while True:
            wanted = await queue.wait_for_waiters()
            try:
                grants = await self._manager.acquire(self._owner, queue.purpose, wanted, _LONG_POLL_S, queue.needs)
                if not grants and queue.needs:
                    await self._fail_if_unplayable(queue)
            except DeviceError as error:
                await self._recover(error, queue)
                continue
            self._unreachable_since.pop(queue, None)
            for grant in grants:
                self._assign(grant, queue)

    async def _fail_if_unplayable(self, queue: _WaitQueue) -> None:
        devices = await self.counters()
        missing = unplayable({"the task": queue.needs}, _capabilities(devices))
        if missing and all(device["is_examined"] for device in devices):
            queue.fail(EnvironmentSetupError(_what_is_missing(missing)))

    def _assign(self, grant: Grant, queue: _WaitQueue) -> None:
        device = LeasedDevice(
            lease_id=grant.lease_id,
            device_id=grant.device_id,
            calls=grant.calls,
            settings=self._settings,
            give_back=self._give_back,
        )
        self._leased[grant.lease_id] = device
        self._watches[grant.lease_id] = asyncio.get_running_loop().create_task(device.watch())
        waiter = queue.take_first()
        if waiter is None:
            self._give_back(device)
        else:
            waiter.set_result(device)

    def _return_unclaimed(self, waiter: asyncio.Future[LeasedDevice]) -> None:
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self._give_back(waiter.result())
        waiter.cancel()

    async def _recover(self, error: DeviceError, queue: _WaitQueue) -> None:
        """Configures the new manager after the loss of the old one.

        Episodes that wait fail with the reason once no manager was reached for ``boot_timeout_s``.
        """
        logger.warning("the device manager does not answer, trying again: %s", error)
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        try:
            await self._manager.configure(self._settings.model_dump(mode="json"))
        except (ConfigError, DeviceError) as new_error:  # ConfigError: the new cluster runs another Ray
            logger.warning("the device manager is still unreachable: %s", new_error)
            now, limit_s = asyncio.get_running_loop().time(), self._settings.boot_timeout_s
            if now - self._unreachable_since.setdefault(queue, now) >= limit_s:
                del self._unreachable_since[queue]
                queue.fail(DeviceError(f"the device manager was unreachable for {limit_s:g} s: {new_error.message}"))

    # ---- leases ------------------------------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        """Renews leases three times per ``lease_timeout_s``, in a loop; marks leases that the manager no longer knows
        as lost."""
        while True:
            await asyncio.sleep(self._settings.lease_timeout_s / 3)
            try:
                lost = await self._manager.renew(self._owner, list(self._leased))
            except DeviceError as error:
                logger.warning("leases could not be renewed: %s", error)
                continue
            for lease_id in lost:
                device = self._leased.get(lease_id)
                if device is not None:
                    device.mark_lost()

    def _give_back(self, device: LeasedDevice) -> None:
        """Returns the device in the background: a cancelled episode cannot wait."""
        if self._leased.pop(device.lease_id, None) is None:
            return
        self._watches.pop(device.lease_id).cancel()
        task = asyncio.get_running_loop().create_task(self._manager.release(device.lease_id, device.report()))
        self._releases.add(task)
        task.add_done_callback(self._log_failure)

    async def _leave(self) -> None:
        """Cancels pending requests: a device granted to a runner that has exited would idle until its lease expires."""
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._manager.leave(self._owner)
        except (DeviceError, TimeoutError) as error:
            logger.warning(
                "this runner could not deregister from the device manager; its devices return when leases expire: %s",
                error,
            )

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._releases.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning(
                "a device could not be returned; it becomes free when its lease expires: %s", task.exception()
            )


def _counts_in_words(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _commonest_error(devices: Sequence[Mapping[str, Any]]) -> str:
    """Returns the most frequent error of failed devices with its count, as a suffix; "" if none has failed."""
    errors = Counter(str(device["last_error"]) for device in devices if device["last_error"])
    return "".join(f"; {count} failed: {error}" for error, count in errors.most_common(1))


def _capabilities(devices: Sequence[Mapping[str, Any]]) -> list[frozenset[str] | None]:
    """Returns the capabilities of each device that was examined; None stands for a device that can play any task."""
    examined = (device["capabilities"] for device in devices if device["is_examined"])
    return [None if names is None else frozenset(names) for names in examined]


def _what_is_missing(tasks: Mapping[str, frozenset[str]]) -> str:
    names = sorted(tasks)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    missing = ", ".join(sorted(frozenset().union(*tasks.values())))
    return (
        f"no device of the pool can play {', '.join(names[:_MAX_NAMES])}{more}: {missing} is missing; add a device "
        "that has it, or leave these tasks out of the input (rollout-buffer doctor says which tasks each device plays)"
    )


class _WaitQueue:
    """The episodes that wait for a device for one purpose and with equal needs, in order of arrival.

    Every operation is O(1) on average, because thousands may wait.
    """

    def __init__(self, purpose: Purpose, needs: frozenset[str]) -> None:
        self.purpose = purpose
        self.needs = needs
        self._waiters: deque[asyncio.Future[LeasedDevice]] = deque()
        self._cancelled_waiters = 0
        """Number of waiters that are still in the queue although they were cancelled."""
        self._has_waiters = asyncio.Event()

    def join(self) -> asyncio.Future[LeasedDevice]:
        """Returns a new future at the end of the queue; a cancelled future does not count any more."""
        waiter: asyncio.Future[LeasedDevice] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(self._count_cancelled)
        self._waiters.append(waiter)
        self._has_waiters.set()
        return waiter

    async def wait_for_waiters(self) -> int:
        """Waits until at least one episode is in the queue; returns their number."""
        while not self.count():
            self._has_waiters.clear()
            await self._has_waiters.wait()
        return self.count()

    def count(self) -> int:
        return len(self._waiters) - self._cancelled_waiters

    def take_first(self) -> asyncio.Future[LeasedDevice] | None:
        """Removes and returns the first waiting future."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                return waiter
            self._cancelled_waiters -= 1
        return None

    def fail(self, reason: EpisodeError) -> None:
        """Fails all waiting futures."""
        while (waiter := self.take_first()) is not None:
            waiter.set_exception(type(reason)(reason.message, reason.detail))

    def _count_cancelled(self, waiter: asyncio.Future[LeasedDevice]) -> None:
        self._cancelled_waiters += waiter.cancelled()
