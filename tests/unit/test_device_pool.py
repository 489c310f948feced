"""Leases, the registry and the pool, all in one process: who gets a device, and what happens when one breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device import Action, ActionKind
from slime_plugins.rollout_buffer.generator.android_world.device_pool import create_device_pool
from slime_plugins.rollout_buffer.generator.android_world.device_registry import DeviceRegistry
from slime_plugins.rollout_buffer.generator.android_world.device_worker import DeviceWorker
from slime_plugins.rollout_buffer.generator.android_world.held_device import LeaseReport
from slime_plugins.rollout_buffer.generator.android_world.leasing import LeaseTable, next_in_line
from slime_plugins.rollout_buffer.generator.android_world.local_device_pool import LocalDevicePool
from slime_plugins.rollout_buffer.generator.android_world.scripted_device import ADDRESS

CLICK = Action(kind=ActionKind.CLICK, point=(1, 1))


def settings(**changes: Any) -> AndroidWorldSettings:
    return AndroidWorldSettings.model_validate({"device": ADDRESS, "device_pool": "local"} | changes)


@asynccontextmanager
async def local_pool(**changes: Any) -> AsyncIterator[LocalDevicePool]:
    pool = LocalDevicePool(settings(**changes))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def counters_of(pool: LocalDevicePool) -> dict[str, Any]:
    (counters,) = await pool.counters()
    return counters


# ---- leases ----------------------------------------------------------------------------------------------------------


class LeasesUnderAnyInterleaving(RuleBasedStateMachine):
    """No device is ever lent twice or lost, whatever owners do and however time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(lease_timeout_s=10, first_lease_id=1)
        self.now = 0.0
        self.lent: dict[int, str] = {}
        self.set_aside = {f"device-{index}" for index in range(4)}

    @precondition(lambda self: self.set_aside)
    @rule(data=st.data())
    def a_device_comes_up(self, data: st.DataObject) -> None:
        device_id = data.draw(st.sampled_from(sorted(self.set_aside)))
        self.table.add(device_id)
        self.set_aside.remove(device_id)

    @rule(owner=st.sampled_from(["a", "b"]))
    def an_owner_takes_one(self, owner: str) -> None:
        free = self.table.free
        lease = self.table.lend(owner, self.now)
        assert (lease is None) == (free == 0)
        if lease is not None:
            assert lease.lease_id > max(self.lent, default=0)
            self.lent[lease.lease_id] = lease.device_id

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def one_comes_back(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.lent)))
        lease = self.table.take_back(lease_id)
        assert lease is not None
        assert self.table.take_back(lease_id) is None
        self.set_aside.add(self.lent.pop(lease_id))

    @rule(passed=st.floats(0, 6), owner=st.sampled_from(["a", "b"]))
    def time_passes_while_one_owner_renews(self, passed: float, owner: str) -> None:
        self.now += passed
        lost = self.table.renew(owner, list(self.lent), self.now)
        assert set(lost) <= set(self.lent)
        for lease in self.table.take_back_expired(self.now):
            assert lease.lease_id in lost
            self.set_aside.add(self.lent.pop(lease.lease_id))

    @invariant()
    def every_device_is_in_one_place(self) -> None:
        lent = list(self.lent.values())
        assert len(set(lent)) == len(lent)
        assert not self.set_aside & set(lent)
        assert self.table.free == 4 - len(lent) - len(self.set_aside)
        assert self.table.held_by("a") + self.table.held_by("b") == len(lent)


LeasesUnderAnyInterleaving.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=30)
TestLeases = LeasesUnderAnyInterleaving.TestCase


def test_a_device_cannot_be_added_twice() -> None:
    table = LeaseTable(lease_timeout_s=1, first_lease_id=1)
    table.add("device-0")
    with pytest.raises(ValueError, match="already"):
        table.add("device-0")


def test_next_is_who_holds_fewest_then_who_waits_longest() -> None:
    assert next_in_line({"training": 0.0, "evaluation": 5.0}, {"training": 3, "evaluation": 1}) == "evaluation"
    assert next_in_line({"late": 2.0, "early": 1.0}, {}) == "early"


# ---- the registry ----------------------------------------------------------------------------------------------------


class FakeWorker:
    """A worker without a device, whose boots and settling a test decides."""

    def __init__(self, index: int, workers_before: int) -> None:
        self.calls = (index, workers_before)
        self.killed = False
        self.settle_error: Exception | None = None

    async def boot(self) -> None:
        await asyncio.sleep(0)

    async def settle(self) -> None:
        if self.settle_error:
            raise self.settle_error

    def kill(self) -> None:
        self.killed = True


@asynccontextmanager
async def registry_of_fakes(
    make: Callable[[int, int], FakeWorker] = FakeWorker, **changes: Any
) -> AsyncIterator[tuple[DeviceRegistry, list[FakeWorker]]]:
    workers: list[FakeWorker] = []

    def launch(_settings: AndroidWorldSettings, index: int, workers_before: int) -> FakeWorker:
        workers.append(make(index, workers_before))
        return workers[-1]

    registry = DeviceRegistry(launch)
    await registry.configure(settings(**changes).model_dump(mode="json"))
    for _ in range(20):  # enough turns of the loop for every fake to boot and settle
        await asyncio.sleep(0)
    try:
        yield registry, workers
    finally:
        await registry.close()


async def test_a_registry_that_knows_no_settings_says_so_instead_of_letting_runners_wait() -> None:
    registry = DeviceRegistry(lambda _settings, index, before: FakeWorker(index, before))
    with pytest.raises(DeviceError, match="was not told its settings"):
        await registry.acquire("a", 1, 60)


async def test_a_runner_gets_at_most_what_it_wants_and_at_least_one() -> None:
    async with registry_of_fakes(num_workers=3) as (registry, _):
        first = await registry.acquire("a", 2, 5)
        second = await registry.acquire("b", 5, 5)
        assert (len(first), len(second)) == (2, 1)
        assert await registry.acquire("b", 1, 0.01) == []


async def test_two_waiting_runners_share_what_comes_free() -> None:
    async with registry_of_fakes(num_workers=4) as (registry, _):
        held = await registry.acquire("a", 4, 5)
        greedy, modest = (
            asyncio.create_task(registry.acquire("a", 4, 5)),
            asyncio.create_task(registry.acquire("b", 4, 5)),
        )
        await asyncio.sleep(0)
        for grant in held[:2]:
            await registry.release(grant.lease_id, LeaseReport())
        (got,) = await modest
        assert got.device_id in {held[0].device_id, held[1].device_id}
        greedy.cancel()


async def test_a_device_that_fails_too_often_in_a_row_gets_a_new_worker() -> None:
    async with registry_of_fakes(num_workers=1, max_consecutive_faults=2) as (registry, workers):
        for fault in ("error", None, "error", "error"):
            (grant,) = await registry.acquire("a", 1, 5)
            assert len(workers) == 1
            await registry.release(grant.lease_id, LeaseReport(fault=fault))
        (grant,) = await registry.acquire("a", 1, 5)
        assert grant.calls == (0, 1)
        assert workers[0].killed


@pytest.mark.parametrize("fault", ["hung", "died"])
async def test_a_hung_or_dead_device_is_replaced_at_once(fault: str) -> None:
    async with registry_of_fakes(num_workers=1) as (registry, _):
        (grant,) = await registry.acquire("a", 1, 5)
        await registry.release(grant.lease_id, LeaseReport(fault=fault))
        (grant,) = await registry.acquire("a", 1, 5)
        assert grant.calls == (0, 1)


async def test_a_device_that_does_not_settle_is_replaced() -> None:
    async with registry_of_fakes(num_workers=1) as (registry, workers):
        (grant,) = await registry.acquire("a", 1, 5)
        workers[0].settle_error = DeviceError("gone")
        await registry.release(grant.lease_id, LeaseReport())
        (grant,) = await registry.acquire("a", 1, 5)
        assert grant.calls == (0, 1)


async def test_what_a_silent_runner_holds_goes_to_the_next_and_its_late_release_is_ignored() -> None:
    async with registry_of_fakes(num_workers=1, lease_timeout_s=0.1) as (registry, _):
        (lost,) = await registry.acquire("silent", 1, 5)
        (grant,) = await registry.acquire("next", 1, 5)
        assert grant.lease_id > lost.lease_id
        assert await registry.renew("silent", [lost.lease_id]) == [lost.lease_id]
        await registry.release(lost.lease_id, LeaseReport())
        assert await registry.renew("next", [grant.lease_id]) == []
        assert (await registry.snapshot())[0]["failures"] == {"lease_expired": 1}


async def test_renewed_leases_outlive_their_time() -> None:
    async with registry_of_fakes(num_workers=1, lease_timeout_s=0.2) as (registry, _):
        (grant,) = await registry.acquire("a", 1, 5)
        for _ in range(6):
            await asyncio.sleep(0.06)
            assert await registry.renew("a", [grant.lease_id]) == []


async def test_a_device_that_does_not_boot_is_tried_again_and_says_why() -> None:
    class NeverBoots(FakeWorker):
        async def boot(self) -> None:
            raise DeviceError("no kernel")

    async with registry_of_fakes(NeverBoots, num_workers=1) as (registry, workers):
        assert await registry.ready(20) == "no kernel"
        assert len(workers) == 2
        assert workers[0].killed


async def test_the_same_settings_change_nothing_and_new_ones_replace_what_comes_back() -> None:
    async with registry_of_fakes(num_workers=2) as (registry, workers):
        grants = await registry.acquire("a", 2, 5)
        await registry.configure(settings(num_workers=2).model_dump(mode="json"))
        assert len(workers) == 2
        await registry.configure(settings(num_workers=1, image_format="jpeg").model_dump(mode="json"))
        for grant in grants:
            await registry.release(grant.lease_id, LeaseReport())
        (grant,) = await registry.acquire("a", 2, 5)
        assert grant.calls == (0, 1)
        assert [worker.killed for worker in workers] == [True, True, False]
        assert len(await registry.snapshot()) == 1


async def test_more_workers_are_added_to_those_at_work() -> None:
    async with registry_of_fakes(num_workers=1) as (registry, _):
        await registry.acquire("a", 1, 5)
        await registry.configure(settings(num_workers=2).model_dump(mode="json"))
        (grant,) = await registry.acquire("b", 2, 5)
        assert grant.device_id == "device-1"


# ---- the worker ------------------------------------------------------------------------------------------------------


def booted_worker() -> DeviceWorker:
    worker = DeviceWorker(settings(), 0)
    worker.boot()
    return worker


def test_a_call_under_an_older_lease_is_refused() -> None:
    worker = booted_worker()
    worker.reset(2, "Solved", 0)
    for late_call in (lambda: worker.step(1, CLICK), lambda: worker.score(1), lambda: worker.reset(1, "Solved", 0)):
        with pytest.raises(DeviceError, match="lease ran out"):
            late_call()
    assert worker.step(2, CLICK).goal == "Play Solved number 0."


def test_a_mistake_in_a_device_becomes_a_device_error() -> None:
    worker = booted_worker()
    worker.reset(1, "Bug", 0)
    with pytest.raises(DeviceError, match="ZeroDivisionError: a mistake"):
        worker.step(1, CLICK)


def test_a_worker_without_device_says_so() -> None:
    worker = booted_worker()
    worker.close()
    worker.close()
    with pytest.raises(DeviceError, match="holds no device"):
        worker.settle()


# ---- the pool --------------------------------------------------------------------------------------------------------


async def test_an_episode_plays_on_a_leased_device_and_gives_it_back() -> None:
    async with local_pool(num_workers=1) as pool:
        for _ in range(3):
            async with await pool.acquire() as device:
                assert (await device.reset("Solved", 1)).goal == "Play Solved number 1."
                await device.step(CLICK)
                assert await device.score() == 1.0
        async with await pool.acquire():
            counters = await counters_of(pool)
        assert (counters["episodes"], counters["steps"], counters["failures"]) == (3, 3, {})
        assert counters["reset_s_p50"] <= counters["reset_s_p95"]


async def test_thousands_of_episodes_wait_in_line_for_a_few_devices() -> None:
    served: list[int] = []

    async with local_pool(num_workers=4) as pool:

        async def episode(number: int) -> str:
            async with await pool.acquire() as device:
                served.append(number)
                await device.reset("Solved", number)
                return device.device_id

        devices = Counter(await asyncio.gather(*(episode(number) for number in range(2000))))
    assert served == sorted(served)
    assert sum(devices.values()) == 2000
    assert len(devices) == 4


async def test_cancelling_episodes_wherever_they_are_loses_no_device() -> None:
    async with local_pool(num_workers=2) as pool:

        async def episode() -> None:
            async with await pool.acquire() as device:
                await device.reset("Solved", 0)
                await device.step(CLICK)

        for delay in range(30):
            tasks = [asyncio.create_task(episode()) for _ in range(5)]
            for _ in range(delay):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with await pool.acquire() as one, await pool.acquire() as other:
            assert one.device_id != other.device_id


async def test_a_hung_device_costs_its_episode_and_is_replaced() -> None:
    async with local_pool(num_workers=1, step_timeout_s=0.2) as pool:
        async with await pool.acquire() as device:
            await device.reset("Hang", 0)
            with pytest.raises(DeviceError, match=r"did not finish the action click within 0\.2 s"):
                await device.step(CLICK)
        async with await pool.acquire() as device:
            await device.reset("Solved", 0)
            counters = await counters_of(pool)
        assert (counters["failures"], counters["replacements"]) == ({"hung": 1}, 1)


async def test_a_wait_may_take_as_long_as_it_says() -> None:
    async with local_pool(num_workers=1, step_timeout_s=0.2) as pool, await pool.acquire() as device:
        await device.reset("Slow", 0)
        await device.step(Action(kind=ActionKind.WAIT, duration_s=5))


async def test_a_bad_task_is_no_fault_of_the_device() -> None:
    async with local_pool(num_workers=1, max_consecutive_faults=1) as pool:
        with pytest.raises(EnvironmentSetupError):
            async with await pool.acquire() as device:
                await device.reset("NoSuch", 0)
        async with await pool.acquire():
            counters = await counters_of(pool)
        assert (counters["failures"], counters["replacements"]) == ({"environment_setup": 1}, 0)


async def test_nobody_waits_for_ever() -> None:
    async with local_pool(num_workers=1, acquire_timeout_s=0.1) as pool, await pool.acquire():
        with pytest.raises(DeviceError, match=r"no Android device became free within 0\.1 s"):
            await pool.acquire()


async def test_a_lost_lease_ends_the_episode_at_its_next_call() -> None:
    async with local_pool(num_workers=1) as pool, await pool.acquire() as device:
        await device.reset("Solved", 0)
        device.mark_lost()
        with pytest.raises(DeviceError, match="silent for too long"):
            await device.step(CLICK)


async def test_a_pool_without_a_device_does_not_start_and_says_why() -> None:
    with pytest.raises(DeviceError, match=r"no Android device came up: .* no_such_module"):
        async with local_pool(device="no_such_module:create_device"):
            pass


def test_a_ray_pool_needs_a_cluster() -> None:
    with pytest.raises(ConfigError, match="needs a Ray cluster"):
        create_device_pool(AndroidWorldSettings(), job_id="job", ray_address=None)
