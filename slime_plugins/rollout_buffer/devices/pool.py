"""The runner's side of the device pool: waits in line for devices, keeps its leases alive, gives devices back.

However many episodes wait, the manager sees one request and one renewal of this runner at a time.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from slime_plugins.rollout_buffer.devices.device_manager import Grant
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.leased_device import DIED, LeasedDevice, LeaseReport
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.errors import DeviceError

logger = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_PAUSE_AFTER_ERROR_S = 1.0
_GOODBYE_TIMEOUT_S = 10.0


class DevicePool(Protocol):
    """Lends devices to the episodes of one runner."""

    async def start(self) -> None:
        """Connects, and returns once a device can be used.

        Raises:
            DeviceError: no device came up in time.
        """
        ...

    async def acquire(self, purpose: Purpose = Purpose.TRAINING) -> LeasedDevice:
        """Returns the next free device, within a purpose first come, first served. Leaving its context gives it back.

        Raises:
            DeviceError: none became free within ``acquire_timeout_s``.
        """
        ...

    async def counters(self) -> list[dict[str, Any]]:
        """Returns what each device did and how it failed."""
        ...

    async def snapshot(self) -> dict[str, Any]:
        """Returns the farm's state: ``pool``, ``may_be_lent``, who waits, and the ``devices`` as ``counters`` do."""
        ...

    async def close(self) -> None:
        """Gives everything back and disconnects; a second call does nothing."""
        ...


class DeviceManagerCalls(Protocol):
    """A ``DeviceManager``, wherever it is. Its calls raise ``DeviceError`` when it cannot be reached."""

    async def configure(self, settings: Mapping[str, Any]) -> None:
        """As ``DeviceManager.configure``."""
        ...

    async def ready(self, wait_s: float) -> str:
        """As ``DeviceManager.ready``."""
        ...

    async def acquire(self, owner: str, purpose: Purpose, wanted: int, wait_s: float) -> list[Grant]:
        """As ``DeviceManager.acquire``."""
        ...

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]:
        """As ``DeviceManager.renew``."""
        ...

    async def release(self, lease_id: int, report: LeaseReport) -> None:
        """As ``DeviceManager.release``."""
        ...

    async def leave(self, owner: str) -> None:
        """As ``DeviceManager.leave``."""
        ...

    async def snapshot(self) -> dict[str, Any]:
        """As ``DeviceManager.snapshot``."""
        ...

    async def close(self) -> None:
        """Lets go of the manager; what it means for the devices is the manager's owner's to say."""
        ...


class ManagedDevicePool:
    """The ``DevicePool`` over any manager. ``owner`` tells runners apart in the manager's eyes and in its logs."""

    def __init__(self, manager: DeviceManagerCalls, settings: DevicePoolSettings, *, owner: str) -> None:
        self._manager = manager
        self._settings = settings
        self._owner = f"{owner}-{uuid.uuid4().hex[:8]}"
        self._lines = {purpose: _WaitQueue(purpose) for purpose in Purpose}
        self._held: dict[int, LeasedDevice] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """As ``DevicePool.start``."""
        why_not = await self._until_ready()
        if why_not:
            raise DeviceError(f"no device came up: {why_not}")
        self._background = [asyncio.create_task(self._hand_out(line)) for line in self._lines.values()]
        self._background.append(asyncio.create_task(self._keep_leases()))

    async def _until_ready(self) -> str:
        """Returns "" once a device can be used, or why none can. A manager that dies meanwhile comes back.

        The time runs while nothing happens: a farm that goes on making and booting devices is waited for.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.boot_timeout_s
        seen = -1
        while True:
            try:
                await self._manager.configure(self._host_settings())
                why_not = await self._manager.ready(min(max(deadline - now(), 0.0), _LONG_POLL_S))
                farm = await self._manager.snapshot() if why_not else {}
                if not why_not or farm.get("unrecoverable"):
                    return why_not
                states = Counter(str(device["state"]) for device in farm["devices"])
                if farm["progress"] != seen or states["preparing"]:
                    seen, deadline = farm["progress"], now() + self._settings.boot_timeout_s
                    logger.info(
                        "waiting for the first device: %s%s", _counted(states), _commonest_error(farm["devices"])
                    )
                if now() >= deadline:
                    return why_not
            except DeviceError as error:
                if error.detail.get("fault") != DIED or now() >= deadline:
                    raise
                logger.warning("the device manager died while its devices came up, trying again: %s", error)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def acquire(self, purpose: Purpose = Purpose.TRAINING) -> LeasedDevice:
        """As ``DevicePool.acquire``."""
        place = self._lines[purpose].join()
        try:
            async with asyncio.timeout(self._settings.acquire_timeout_s):
                return await place
        except TimeoutError as timeout:
            self._return_unclaimed(place)
            seconds = self._settings.acquire_timeout_s
            raise DeviceError(f"no device became free within {seconds:g} s") from timeout
        except asyncio.CancelledError:
            # The device may have been handed over in the very moment of the cancellation.
            self._return_unclaimed(place)
            raise

    async def counters(self) -> list[dict[str, Any]]:
        """As ``DevicePool.counters``."""
        snapshot = await self._manager.snapshot()
        devices: list[dict[str, Any]] = snapshot["devices"]
        return devices

    async def snapshot(self) -> dict[str, Any]:
        """As ``DevicePool.snapshot``."""
        waiting = {line.purpose.value: line.count() for line in self._lines.values()}
        return await self._manager.snapshot() | {"episodes_waiting": waiting}

    async def close(self) -> None:
        """As ``DevicePool.close``."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        started, self._background = bool(self._background), []
        for held in list(self._held.values()):
            self._give_back(held)
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=_GOODBYE_TIMEOUT_S)
        if started:
            await self._leave()
        await self._manager.close()

    # ---- waiting in line ---------------------------------------------------------------------------------------------

    async def _hand_out(self, line: _WaitQueue) -> None:
        """Asks for as many devices as episodes wait for, for ever."""
        while True:
            wanted = await line.somebody()
            try:
                grants = await self._manager.acquire(self._owner, line.purpose, wanted, _LONG_POLL_S)
            except DeviceError as error:
                await self._recover(error)
                continue
            for grant in grants:
                self._hand_over(grant, line)

    def _hand_over(self, grant: Grant, line: _WaitQueue) -> None:
        held = LeasedDevice(
            lease_id=grant.lease_id,
            device_id=grant.device_id,
            calls=grant.calls,
            settings=self._settings,
            give_back=self._give_back,
        )
        self._held[grant.lease_id] = held
        self._watches[grant.lease_id] = asyncio.get_running_loop().create_task(held.watch())
        place = line.first()
        if place is None:
            self._give_back(held)
        else:
            place.set_result(held)

    def _return_unclaimed(self, place: asyncio.Future[LeasedDevice]) -> None:
        if place.done() and not place.cancelled():
            self._give_back(place.result())
        place.cancel()

    async def _recover(self, error: DeviceError) -> None:
        """After losing the manager: tells the new one our settings. Episodes wait on; their own deadline counts."""
        logger.warning("the device manager does not answer, trying again: %s", error)
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        try:
            await self._manager.configure(self._host_settings())
        except DeviceError as still:
            logger.warning("the device manager is still away: %s", still)

    # ---- holding and giving back -------------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        """Renews what is held three times per lease, for ever; marks what was lost."""
        while True:
            await asyncio.sleep(self._settings.lease_timeout_s / 3)
            try:
                lost = await self._manager.renew(self._owner, list(self._held))
            except DeviceError as error:
                logger.warning("leases could not be renewed: %s", error)
                continue
            for lease_id in lost:
                held = self._held.get(lease_id)
                if held is not None:
                    held.mark_lost()

    def _give_back(self, held: LeasedDevice) -> None:
        """Sends the device back without waiting, so that a cancelled episode gives back just the same."""
        if self._held.pop(held.lease_id, None) is None:
            return
        self._watches.pop(held.lease_id).cancel()
        self._send_in_background(self._manager.release(held.lease_id, held.report()))

    async def _leave(self) -> None:
        """Leaves the line: what was asked for last would otherwise be lent to nobody, until its lease ends."""
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await self._manager.leave(self._owner)
        except (DeviceError, TimeoutError) as error:
            logger.warning(
                "the device manager heard no goodbye, what it lends to this runner comes back late: %s", error
            )

    def _send_in_background(self, farewell: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(farewell)
        self._farewells.add(task)
        task.add_done_callback(self._log_failure)

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._farewells.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a device could not be given back and returns when its lease ends: %s", task.exception())

    def _host_settings(self) -> dict[str, Any]:
        return self._settings.model_dump(mode="json")


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _commonest_error(devices: Sequence[Mapping[str, Any]]) -> str:
    """Says what most of the devices that have failed so far have failed with; "" while none has."""
    errors = Counter(str(device["last_error"]) for device in devices if device["last_error"])
    return "".join(f"; {count} failed: {error}" for error, count in errors.most_common(1))


class _WaitQueue:
    """Episodes that wait for a device for one purpose, in the order in which they came. Every step is O(1) on average:
    thousands may wait."""

    def __init__(self, purpose: Purpose) -> None:
        self.purpose = purpose
        self._places: deque[asyncio.Future[LeasedDevice]] = deque()
        self._left_early = 0
        self._somebody = asyncio.Event()

    def join(self) -> asyncio.Future[LeasedDevice]:
        """Returns a place at the end of the line; cancelling it leaves the line."""
        place: asyncio.Future[LeasedDevice] = asyncio.get_running_loop().create_future()
        place.add_done_callback(self._note_who_leaves)
        self._places.append(place)
        self._somebody.set()
        return place

    async def somebody(self) -> int:
        """Returns how many wait, once anybody does."""
        while not self.count():
            self._somebody.clear()
            await self._somebody.wait()
        return self.count()

    def count(self) -> int:
        """Returns how many wait."""
        return len(self._places) - self._left_early

    def first(self) -> asyncio.Future[LeasedDevice] | None:
        """Takes the first one out of the line who still waits."""
        while self._places:
            place = self._places.popleft()
            if not place.done():
                return place
            self._left_early -= 1
        return None

    def _note_who_leaves(self, place: asyncio.Future[LeasedDevice]) -> None:
        self._left_early += place.cancelled()
