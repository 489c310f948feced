"""A training and an evaluation on one farm, each through a pool of its own: who holds how many devices for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import Any

import pytest

from slime_plugins.rollout_buffer.devices.device_manager import DeviceManager, Worker
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.pool import ManagedDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from tests.virtual_time import in_virtual_time

TRAINING, EVALUATION = Purpose.TRAINING, Purpose.EVALUATION
HOUR_S = 3600.0


class IdleWorker:
    """A worker whose device does nothing and never fails; it is looked after in a millisecond."""

    def __init__(self) -> None:
        self.calls = self

    async def lost(self, lease_id: int, wait_s: float) -> str:
        await asyncio.sleep(wait_s)
        return ""

    async def prepare(self) -> None: ...

    async def boot(self) -> str:
        return "here"

    async def settle(self) -> None:
        await asyncio.sleep(0.001)

    def kill(self) -> None: ...


class DistantManager:
    """A manager in another process: a call takes a while to get there, its answer a while to get back."""

    def __init__(self, manager: DeviceManager, way_s: float) -> None:
        self._manager, self._way_s = manager, way_s

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            await asyncio.sleep(self._way_s)
            answer = await getattr(self._manager, name)(*arguments)
            await asyncio.sleep(self._way_s)
            return answer

        return call

    async def close(self) -> None: ...


class Farm:
    """Devices, a pool of each purpose on them, what each holds, and for how many seconds it held how much."""

    def __init__(self, pools: dict[Purpose, ManagedDevicePool]) -> None:
        self.pools = pools
        self.held: Counter[Purpose] = Counter()
        self._since = 0.0
        self._playing: list[asyncio.Task[None]] = []
        self.seconds: Counter[tuple[int, int]] = Counter()

    def play(self, purpose: Purpose, at_once: int, episode_s: Sequence[float]) -> None:
        """Plays so many episodes at once, one after another for ever."""
        self._playing += [asyncio.create_task(self._play(purpose, n, episode_s)) for n in range(at_once)]

    async def _play(self, purpose: Purpose, first: int, episode_s: Sequence[float]) -> None:
        for seconds in islice(cycle(episode_s), first, None):
            async with await self.pools[purpose].acquire(purpose):
                self._hold(purpose, 1)
                await asyncio.sleep(seconds)
                self._hold(purpose, -1)

    def _hold(self, purpose: Purpose, more: int) -> None:
        now = asyncio.get_running_loop().time()
        self.seconds[self.held[TRAINING], self.held[EVALUATION]] += now - self._since  # type: ignore[assignment]  # seconds
        self._since = now
        self.held[purpose] += more

    async def settle_down(self) -> None:
        """Lets the last episodes from before end; what is counted begins then."""
        await asyncio.sleep(200)
        self._hold(TRAINING, 0)
        self.seconds.clear()

    async def end(self) -> None:
        """Ends what is played."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        for pool in self.pools.values():
            await pool.close()

    def share_of_time(self, condition: Any) -> float:
        """For which part of the time ``condition(training, evaluation)`` was true of what they held."""
        return sum(s for held, s in self.seconds.items() if condition(*held)) / sum(self.seconds.values())


@asynccontextmanager
async def farm_of(devices: int, evaluation_share: float) -> AsyncIterator[Farm]:
    settings = DevicePoolSettings(
        kind=ADDRESS, num_workers=devices, evaluation_share=evaluation_share, acquire_timeout_s=1e6
    )

    def launch(*_: Any) -> Worker:
        return IdleWorker()

    manager = DeviceManager(launch, clock=asyncio.get_running_loop().time)
    pools = {purpose: ManagedDevicePool(DistantManager(manager, 0.002), settings, owner=purpose) for purpose in Purpose}
    for pool in pools.values():
        await pool.start()
    farm = Farm(pools)
    try:
        yield farm
    finally:
        await farm.end()
        await manager.close()


@pytest.mark.parametrize("episode_s", [(30.0,), (30.0, 60.0, 61.0, 90.0)], ids=["together", "one by one"])
@pytest.mark.parametrize(("devices", "evaluation_share", "of_training"), [(4, 0.5, 2), (4, 0.25, 3), (8, 0.25, 6)])
@in_virtual_time
async def test_a_training_that_wants_devices_never_holds_fewer_than_its_share(
    devices: int, evaluation_share: float, of_training: int, episode_s: tuple[float, ...]
) -> None:
    """Also where episodes end together: what comes back meets only one purpose's request, the other is on its way."""
    async with farm_of(devices, evaluation_share) as farm:
        farm.play(TRAINING, 3 * devices, episode_s)
        farm.play(EVALUATION, 3 * devices, episode_s)
        await farm.settle_down()
        await asyncio.sleep(HOUR_S)
        # On their way from an episode to the next, and back, devices are nobody's for some milliseconds.
        assert farm.share_of_time(lambda training, evaluation: (training, evaluation) == (
            of_training, devices - of_training)) > 0.998  # fmt: skip


@in_virtual_time
async def test_a_share_that_nobody_wants_goes_to_the_other() -> None:
    async with farm_of(8, 0.5) as farm:
        farm.play(TRAINING, 2, (30.0,))
        farm.play(EVALUATION, 20, (30.0, 45.0))
        await farm.settle_down()
        await asyncio.sleep(HOUR_S)
        assert farm.share_of_time(lambda training, evaluation: (training, evaluation) == (2, 6)) > 0.998


@in_virtual_time
async def test_what_is_kept_for_a_purpose_that_does_not_ask_again_is_lent_a_moment_later() -> None:
    async with farm_of(2, 0.5) as farm:
        farm.play(EVALUATION, 4, (30.0,))
        await farm.settle_down()
        training = farm.pools[TRAINING]
        async with await training.acquire(TRAINING):
            await asyncio.sleep(100)
        await asyncio.sleep(1.5)
        assert farm.held[EVALUATION] == 2
