"""The runner's side of the device pool: waits in line for devices, keeps its leases alive, gives devices back.

However many episodes wait, the registry sees one request and one renewal of this runner at a time.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_registry import Grant
from slime_plugins.rollout_buffer.generator.android_world.held_device import HeldDevice, LeaseReport

__all__ = ["DevicePool", "RegistryCalls", "RegistryDevicePool"]

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

    async def acquire(self) -> HeldDevice:
        """Returns the next free device, first come, first served. Leaving its context gives it back.

        Raises:
            DeviceError: none became free within ``acquire_timeout_s``.
        """
        ...

    async def counters(self) -> list[dict[str, Any]]:
        """Returns what each device did and how it failed."""
        ...

    async def close(self) -> None:
        """Gives everything back and disconnects; a second call does nothing."""
        ...


class RegistryCalls(Protocol):
    """A ``DeviceRegistry``, wherever it is. Its calls raise ``DeviceError`` when it cannot be reached."""

    async def configure(self, settings: Mapping[str, Any]) -> None:
        """As ``DeviceRegistry.configure``."""
        ...

    async def ready(self, wait_s: float) -> str:
        """As ``DeviceRegistry.ready``."""
        ...

    async def acquire(self, owner: str, wanted: int, wait_s: float) -> list[Grant]:
        """As ``DeviceRegistry.acquire``."""
        ...

    async def renew(self, owner: str, lease_ids: Sequence[int]) -> list[int]:
        """As ``DeviceRegistry.renew``."""
        ...

    async def release(self, lease_id: int, report: LeaseReport) -> None:
        """As ``DeviceRegistry.release``."""
        ...

    async def snapshot(self) -> list[dict[str, Any]]:
        """As ``DeviceRegistry.snapshot``."""
        ...

    async def close(self) -> None:
        """Lets go of the registry; what it means for the devices is the registry's owner's to say."""
        ...


class RegistryDevicePool:
    """The ``DevicePool`` over any registry. ``owner`` tells runners apart in the registry's eyes and in its logs."""

    def __init__(self, registry: RegistryCalls, settings: AndroidWorldSettings, *, owner: str) -> None:
        self._registry = registry
        self._settings = settings
        self._owner = f"{owner}-{uuid.uuid4().hex[:8]}"
        self._waiting: deque[asyncio.Future[HeldDevice]] = deque()
        self._somebody_waits = asyncio.Event()
        self._held: dict[int, HeldDevice] = {}
        self._background: list[asyncio.Task[None]] = []
        self._farewells: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """As ``DevicePool.start``."""
        await self._registry.configure(self._host_settings())
        why_not = await self._registry.ready(self._settings.boot_timeout_s)
        if why_not:
            raise DeviceError(f"no Android device came up: {why_not}")
        self._background = [asyncio.create_task(self._hand_out()), asyncio.create_task(self._keep_leases())]

    async def acquire(self) -> HeldDevice:
        """As ``DevicePool.acquire``."""
        place: asyncio.Future[HeldDevice] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._somebody_waits.set()
        try:
            async with asyncio.timeout(self._settings.acquire_timeout_s):
                return await place
        except TimeoutError as timeout:
            self._return_unclaimed(place)
            seconds = self._settings.acquire_timeout_s
            raise DeviceError(f"no Android device became free within {seconds:g} s") from timeout
        except asyncio.CancelledError:
            # The device may have been handed over in the very moment of the cancellation.
            self._return_unclaimed(place)
            raise

    async def counters(self) -> list[dict[str, Any]]:
        """As ``DevicePool.counters``."""
        return await self._registry.snapshot()

    async def close(self) -> None:
        """As ``DevicePool.close``."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._background = []
        for held in list(self._held.values()):
            self._give_back(held)
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=_GOODBYE_TIMEOUT_S)
        await self._registry.close()

    # ---- waiting in line ---------------------------------------------------------------------------------------------

    async def _hand_out(self) -> None:
        """Asks for as many devices as episodes wait for, for ever."""
        while True:
            await self._somebody_waits.wait()
            wanted = self._count_waiting()
            if wanted == 0:
                self._somebody_waits.clear()
                continue
            try:
                grants = await self._registry.acquire(self._owner, wanted, _LONG_POLL_S)
            except DeviceError as error:
                await self._recover(error)
                continue
            for grant in grants:
                self._hand_over(grant)

    def _count_waiting(self) -> int:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return sum(not place.done() for place in self._waiting)

    def _hand_over(self, grant: Grant) -> None:
        held = HeldDevice(
            lease_id=grant.lease_id,
            device_id=grant.device_id,
            calls=grant.calls,
            settings=self._settings,
            give_back=self._give_back,
        )
        self._held[grant.lease_id] = held
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(held)
                return
        self._give_back(held)

    def _return_unclaimed(self, place: asyncio.Future[HeldDevice]) -> None:
        if place.done() and not place.cancelled():
            self._give_back(place.result())
        place.cancel()

    async def _recover(self, error: DeviceError) -> None:
        """After losing the registry: tells the new one our settings. Episodes wait on; their own deadline counts."""
        logger.warning("the device registry does not answer, trying again: %s", error)
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        try:
            await self._registry.configure(self._host_settings())
        except DeviceError as still:
            logger.warning("the device registry is still away: %s", still)

    # ---- holding and giving back -------------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        """Renews what is held three times per lease, for ever; marks what was lost."""
        while True:
            await asyncio.sleep(self._settings.lease_timeout_s / 3)
            try:
                lost = await self._registry.renew(self._owner, list(self._held))
            except DeviceError as error:
                logger.warning("leases could not be renewed: %s", error)
                continue
            for lease_id in lost:
                held = self._held.get(lease_id)
                if held is not None:
                    held.mark_lost()

    def _give_back(self, held: HeldDevice) -> None:
        """Sends the device back without waiting, so that a cancelled episode gives back just the same."""
        if self._held.pop(held.lease_id, None) is None:
            return
        self._say(self._registry.release(held.lease_id, held.report()))

    def _say(self, farewell: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(farewell)
        self._farewells.add(task)
        task.add_done_callback(self._said)

    def _said(self, task: asyncio.Task[None]) -> None:
        self._farewells.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a device could not be given back and returns when its lease ends: %s", task.exception())

    def _host_settings(self) -> dict[str, Any]:
        return self._settings.for_devices().model_dump(mode="json")
