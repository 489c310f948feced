"""The device pool without Ray: each device runs in a thread of this process.

Its ``DeviceManager`` and ``DevicePool`` are those of the Ray pool; only the workers differ. A hung device cannot be
killed: its thread remains until the process exits.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.devices.device_manager import DeviceManager
from slime_plugins.rollout_buffer.devices.interface import Action, Observation
from slime_plugins.rollout_buffer.devices.leased_device import device_died
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.devices.worker import DeviceWorker

_LOSS_POLL_S = 1.0
_Result = TypeVar("_Result")


class LocalDevicePool(DevicePool):
    """A ``DevicePool`` whose devices are threads of this process."""

    def __init__(self, settings: DevicePoolSettings, *, owner: str = "local") -> None:
        manager = DeviceManager(lambda settings, index, _: _WorkerThread(settings, index), name=f"local-{os.getpid()}")
        super().__init__(manager, settings, owner=owner)


class _WorkerThread:
    """A device worker in a daemon thread; both the manager's ``Worker`` and the episode's ``DeviceCalls``."""

    def __init__(self, settings: DevicePoolSettings, index: int) -> None:
        self._worker = DeviceWorker(settings, index)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._killed = False
        threading.Thread(target=self._run, name=f"device-{index}", daemon=True).start()

    @property
    def calls(self) -> _WorkerThread:
        return self

    async def prepare(self) -> None:
        await self._call(self._worker.prepare)

    async def boot(self) -> str:
        await self._call(self._worker.boot)
        return f"process {os.getpid()}"

    async def check_health(self) -> frozenset[str] | None:
        return await self._call(self._worker.check_health)

    async def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation:
        return await self._call(lambda: self._worker.reset(lease_id, task_name, params_idx))

    async def step(self, lease_id: int, action: Action) -> Observation:
        return await self._call(lambda: self._worker.step(lease_id, action))

    async def score(self, lease_id: int) -> float:
        return await self._call(lambda: self._worker.score(lease_id))

    async def lost(self, lease_id: int, wait_s: float) -> str:
        for _ in range(math.ceil(wait_s / _LOSS_POLL_S)):
            if why := self._worker.lost(lease_id, 0.0):
                return why
            await asyncio.sleep(_LOSS_POLL_S)
        return ""

    def kill(self) -> None:
        self._killed = True
        self._calls.put((self._worker.close, Future()))
        self._calls.put(None)

    async def _call(self, call: Callable[[], _Result]) -> _Result:
        if self._killed:
            raise device_died("the device was closed")
        answer: Future[_Result] = Future()
        self._calls.put((call, answer))
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, answer = entry
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                answer.set_exception(error)
