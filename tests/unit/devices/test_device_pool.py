"""Leases, the manager and the pool, all in one process: who gets a device, and what happens when one breaks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime_plugins.rollout_buffer.devices.boot_schedule import BootSchedule
from slime_plugins.rollout_buffer.devices.device_manager import DeviceManager, Grant
from slime_plugins.rollout_buffer.devices.fair_share import Claimant, Purpose
from slime_plugins.rollout_buffer.devices.kinds import misconfigured
from slime_plugins.rollout_buffer.devices.lease_table import LeaseTable
from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport, device_died
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.devices.worker import DeviceWorker
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError, RolloutBufferError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from tests.example_counts import examples
from tests.virtual_time import in_virtual_time

CLICK = Action(kind=ActionKind.CLICK, point=(1, 1))


def settings(**changes: Any) -> DevicePoolSettings:
    return DevicePoolSettings.model_validate({"kind": ADDRESS, "device_pool": "local"} | changes)


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


def training(owner: str) -> Claimant:
    return Claimant(owner=owner, purpose=Purpose.TRAINING)


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
        free = sum(count for _, count in self.table.free_by_kind())
        lease = self.table.lend(training(owner), self.now)
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

    @rule(owner=st.sampled_from(["a", "b"]))
    def an_owner_leaves(self, owner: str) -> None:
        held = self.table.held()[training(owner)]
        taken = self.table.take_back_all_of(owner)
        assert len(taken) == held
        for lease in taken:
            assert lease.holder.owner == owner
            self.set_aside.add(self.lent.pop(lease.lease_id))

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
        assert sum(count for _, count in self.table.free_by_kind()) == 4 - len(lent) - len(self.set_aside)
        held = self.table.held()
        assert held[training("a")] + held[training("b")] == self.table.lent == len(lent)
        assert sorted(self.table.holders()) == sorted(lent)


LeasesUnderAnyInterleaving.TestCase.settings = examples(60, stateful_step_count=30)
TestLeases = LeasesUnderAnyInterleaving.TestCase


# ---- the manager ----------------------------------------------------------------------------------------------------


class FakeWorker:
    """A worker without a device, whose boots and settling a test decides."""

    def __init__(self, index: int, workers_before: int) -> None:
        self.calls = (index, workers_before)
        self.killed = False
        self.settle_error: Exception | None = None
        self.capabilities: frozenset[str] | None = None

    async def prepare(self) -> None:
        pass

    async def boot(self) -> str:
        await asyncio.sleep(0)
        return "here"

    async def check_health(self) -> frozenset[str] | None:
        if self.settle_error:
            raise self.settle_error
        return self.capabilities

    def kill(self) -> None:
        self.killed = True


@asynccontextmanager
async def manager_of_fakes(
    make: Callable[[int, int], FakeWorker] = FakeWorker, **changes: Any
) -> AsyncIterator[tuple[DeviceManager, list[FakeWorker]]]:
    workers: list[FakeWorker] = []

    def launch(_settings: DevicePoolSettings, index: int, workers_before: int) -> FakeWorker:
        workers.append(make(index, workers_before))
        return workers[-1]

    manager = DeviceManager(launch, clock=asyncio.get_running_loop().time)
    await manager.configure(settings(**changes).model_dump(mode="json"))
    await turns()  # every fake boots and settles
    try:
        yield manager, workers
    finally:
        await manager.close()


@in_virtual_time
async def test_a_runner_gets_at_most_what_it_wants_and_at_least_one() -> None:
    async with manager_of_fakes(num_workers=3) as (manager, _):
        first = await manager.acquire("a", Purpose.TRAINING, 2, 5)
        second = await manager.acquire("b", Purpose.TRAINING, 5, 5)
        assert (len(first), len(second)) == (2, 1)
        assert await manager.acquire("b", Purpose.TRAINING, 1, 0.01) == []


@in_virtual_time
async def test_what_a_silent_runner_holds_goes_to_the_next_and_its_late_release_is_ignored() -> None:
    async with manager_of_fakes(num_workers=1, lease_timeout_s=0.1) as (manager, _):
        (lost,) = await manager.acquire("silent", Purpose.TRAINING, 1, 5)
        (grant,) = await manager.acquire("next", Purpose.TRAINING, 1, 5)
        assert grant.lease_id > lost.lease_id
        assert await manager.renew("silent", [lost.lease_id]) == [lost.lease_id]
        await manager.release(lost.lease_id, LeaseReport())
        assert await manager.renew("next", [grant.lease_id]) == []
        assert (await manager.snapshot())["devices"][0]["failures"] == {"lease_expired": 1}


# ---- capabilities ----------------------------------------------------------------------------------------------------

SUBSETS = st.frozensets(st.sampled_from(["root", "sms", "grpc"]))


@examples(40)
@example(
    devices=[frozenset(), frozenset(), frozenset(), frozenset({"sms"})],
    lines=[("a", Purpose.TRAINING, frozenset()), ("b", Purpose.TRAINING, frozenset({"sms"}))],
    returns=[0] * 30,
    spares=2,
)
@given(
    devices=st.lists(SUBSETS, min_size=1, max_size=4),
    lines=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Purpose), SUBSETS), min_size=1, unique=True),
    returns=st.lists(st.integers(0, 3), min_size=30, max_size=60),
    spares=st.integers(0, 2),
)
def test_no_device_gets_a_task_that_it_cannot_play_none_that_can_stays_idle_and_each_task_has_its_turn(
    devices: list[frozenset[str]], lines: list[tuple[str, Purpose, frozenset[str]]], returns: list[int], spares: int
) -> None:
    """Every line always wants more. Whom a device can play at all is served within a bounded number of its leases."""

    @in_virtual_time
    async def played() -> None:
        def able(index: int, before: int) -> FakeWorker:
            worker = FakeWorker(index, before)
            worker.capabilities = devices[index]
            return worker

        to_lend = max(1, len(devices) - spares)
        async with manager_of_fakes(able, num_workers=to_lend, spare_devices=len(devices) - to_lend) as (manager, _):
            served = dict.fromkeys(lines, 0)
            held: list[tuple[int, int]] = []

            async def ask_for_ever(line: tuple[str, Purpose, frozenset[str]]) -> None:
                owner, purpose, needs = line
                while True:
                    for grant in await manager.acquire(owner, purpose, 1, 60, needs):
                        assert needs <= devices[int(grant.device_id.removeprefix("device-"))]
                        served[line] += 1
                        held.append((grant.lease_id, int(grant.device_id.removeprefix("device-"))))

            asking = [asyncio.create_task(ask_for_ever(line)) for line in lines]
            for turn, number in enumerate([*returns, *range(12 * len(lines) * len(devices))]):
                if turn == len(returns):
                    served.update(dict.fromkeys(lines, 0))  # from here on each line must be served again
                await asyncio.sleep(2)  # longer than a reservation
                lent = {index for _, index in held}
                assert len(lent) <= to_lend
                for index in set(range(len(devices))) - lent if len(lent) < to_lend else ():
                    assert not any(needs <= devices[index] for _, _, needs in lines)
                if held:
                    lease_id, _ = held.pop(number % len(held))
                    await manager.release(lease_id, LeaseReport())
            for line, count in served.items():
                assert count > 0 or not any(line[2] <= device for device in devices)
            for task in asking:
                task.cancel()

    played()


@in_virtual_time
async def test_a_task_waits_for_a_device_that_can_play_it_while_others_go_on() -> None:
    loop = asyncio.get_running_loop()

    def able(_settings: DevicePoolSettings, index: int, before: int) -> FakeWorker:
        worker = FakeWorker(index, before)
        worker.capabilities = frozenset({"root", "sms"} if index else {"root"})
        return worker

    manager = DeviceManager(able, clock=loop.time)
    pool = DevicePool(manager, settings(num_workers=2), owner="job")
    await pool.start()
    await pool.check_playable({"SendText": frozenset({"sms"}), "Toggle": frozenset({"root"})})
    with pytest.raises(ConfigError, match=r"no device of the pool can play Draw, Type: grpc is missing; add a device"):
        await pool.check_playable(
            {"Draw": frozenset({"grpc", "sms"}), "Type": frozenset({"grpc"}), "Toggle": frozenset()}
        )
    text = await pool.acquire(needs=frozenset({"sms"}))
    assert text.device_id == "device-1"
    waiting = asyncio.create_task(pool.acquire(needs=frozenset({"sms"})))
    for _ in range(3):
        async with await pool.acquire(needs=frozenset({"root"})) as other:
            assert other.device_id == "device-0"
    assert not waiting.done()
    text.give_back()
    assert (await waiting).device_id == "device-1"
    with pytest.raises(EnvironmentSetupError, match="no device of the pool can play the task: grpc is missing"):
        await pool.acquire(needs=frozenset({"grpc"}))
    await pool.close()
    await manager.close()


class DyingManager(DeviceManager):
    """Dies in the first calls of ``ready``, as an actor does whose process was killed, and has forgotten all then."""

    def __init__(self, *deaths: DeviceError) -> None:
        super().__init__(functools.partial(launched, FakeWorker))
        self.deaths = list(deaths)
        self.configured = 0

    async def configure(self, settings: Mapping[str, Any], *, new_start: bool = False) -> None:
        self.configured += 1
        await super().configure(settings, new_start=new_start)

    async def ready(self, wait_s: float) -> str:
        if self.deaths:
            raise self.deaths.pop()
        return await super().ready(wait_s)


@in_virtual_time
async def test_a_manager_that_dies_while_a_runner_starts_costs_time_and_not_the_job() -> None:
    manager = DyingManager(device_died("killed"), device_died("killed again"))
    pool = DevicePool(manager, settings(), owner="job")
    await pool.start()
    assert manager.configured == 3
    await pool.close()


@pytest.mark.parametrize("kind", [DeviceError, ConfigError])
@in_virtual_time
async def test_an_episode_fails_with_the_reason_once_no_manager_was_reached_for_the_time_of_a_boot(
    kind: type[RolloutBufferError],
) -> None:
    class Lost(DeviceManager):
        gone = False

        async def configure(self, settings: Mapping[str, Any], *, new_start: bool = False) -> None:
            if self.gone:
                raise kind("the Ray cluster cannot be used: WrongClusterID")
            await super().configure(settings, new_start=new_start)

        async def acquire(
            self, owner: str, purpose: Purpose, wanted: int, wait_s: float, needs: frozenset[str] = frozenset()
        ) -> list[Grant]:
            if self.gone:
                raise device_died("the manager is gone")
            return await super().acquire(owner, purpose, wanted, wait_s, needs)

    loop = asyncio.get_running_loop()
    manager = Lost(functools.partial(launched, FakeWorker), clock=loop.time)
    pool = DevicePool(manager, settings(boot_timeout_s=120), owner="job")
    await pool.start()
    manager.gone, began = True, loop.time()
    each = await asyncio.gather(*(pool.acquire(purpose) for purpose in Purpose), return_exceptions=True)
    reason = "unreachable for 120 s: the Ray cluster cannot be used: WrongClusterID"
    assert [reason in str(error) for error in each] == [True] * len(Purpose)
    assert 120 <= loop.time() - began < 130
    manager.gone = False
    async with await pool.acquire():
        pass
    await pool.close()
    await manager.close()


@in_virtual_time
async def test_an_episode_that_is_cancelled_when_its_wait_fails_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    manager = DeviceManager(functools.partial(launched, FakeWorker), clock=loop.time)
    pool = DevicePool(manager, settings(), owner="job")
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    for queue in pool._queues.values():
        queue.fail(DeviceError("the device manager is unreachable"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await manager.close()


async def test_an_episode_that_waits_fails_when_its_pool_closes_and_a_later_one_at_once() -> None:
    async with local_pool(num_workers=1) as pool:
        held = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await turns()
        await pool.close()
        for late in (waiting, pool.acquire()):
            with pytest.raises(DeviceError, match="the device pool was closed"):
                await asyncio.wait_for(late, 10)
        held.give_back()


async def test_a_pool_that_closes_leaves_its_manager_once_also_if_that_is_gone() -> None:
    left_by: list[str] = []

    class Noting(DeviceManager):
        async def leave(self, owner: str) -> None:
            left_by.append(owner)
            raise DeviceError("gone")

    manager = Noting(functools.partial(launched, FakeWorker))
    pool = DevicePool(manager, settings(), owner="job")
    await pool.close()
    assert left_by == []
    await pool.start()
    await pool.close()
    await pool.close()
    assert len(left_by) == 1


@in_virtual_time
async def test_renewed_leases_outlive_their_time() -> None:
    async with manager_of_fakes(num_workers=1, lease_timeout_s=0.2) as (manager, _):
        (grant,) = await manager.acquire("a", Purpose.TRAINING, 1, 5)
        for _ in range(6):
            await asyncio.sleep(0.06)
            assert await manager.renew("a", [grant.lease_id]) == []


@given(
    steps=st.lists(st.integers(min_value=0, max_value=10_000), min_size=1, max_size=30),
    stagger_s=st.integers(min_value=0, max_value=60),
)
def test_boots_begin_apart_and_none_waits_for_nothing(steps: list[int], stagger_s: int) -> None:
    schedule, now, begun = BootSchedule(0), 0, []
    for step in steps:
        now += step
        begun.append(now + schedule.take_turn(now, stagger_s))
    assert all(later - earlier >= stagger_s for earlier, later in itertools.pairwise(begun))
    assert begun[0] == steps[0]


class NeverBoots(FakeWorker):
    """Notes when it is asked to boot, and does not."""

    times: list[float]

    async def boot(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        raise self.error

    error = DeviceError("no kernel")


@in_virtual_time
async def test_a_device_that_does_not_boot_is_tried_ten_times_with_ten_seconds_between_and_says_why() -> None:
    NeverBoots.times = []
    async with manager_of_fakes(NeverBoots, num_workers=1) as (manager, workers):
        assert await manager.ready(3600) == "no kernel"
        assert np.diff(NeverBoots.times) == pytest.approx([10] * 9)
        assert all(worker.killed for worker in workers)
        assert (await manager.snapshot())["unrecoverable"]
        await asyncio.sleep(3600)  # and goes on, ever less often
        later = np.diff(NeverBoots.times[9:])
        assert later[:5] == pytest.approx([10, 20, 40, 80, 160])
        assert later[5:] == pytest.approx([160] * len(later[5:]))


@in_virtual_time
async def test_a_farm_whose_settings_are_wrong_is_given_up_at_once() -> None:
    class Misconfigured(NeverBoots):
        error = misconfigured("there is no virtual device Base")

    NeverBoots.times = []
    pool = DevicePool(DeviceManager(functools.partial(launched, Misconfigured)), settings(num_workers=3), owner="job")
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeviceError, match="there is no virtual device Base"):
        await pool.start()
    assert asyncio.get_running_loop().time() - began < 10
    await pool.close()


@in_virtual_time
async def test_a_start_after_the_host_was_repaired_boots_the_devices_that_were_given_up_at_once() -> None:
    repaired = False

    class Repairable(FakeWorker):
        async def boot(self) -> str:
            if not repaired:
                raise misconfigured("there is no virtual device Base")
            return "here"

    loop = asyncio.get_running_loop()
    manager = DeviceManager(functools.partial(launched, Repairable), clock=loop.time)
    with pytest.raises(DeviceError, match="there is no virtual device Base"):
        await DevicePool(manager, settings(num_workers=2), owner="job").start()
    await asyncio.sleep(600)  # the devices are tried less and less often
    repaired, began = True, loop.time()
    pool = DevicePool(manager, settings(num_workers=2), owner="next job")
    await pool.start()
    assert loop.time() - began < 1
    await pool.close()
    await manager.close()


async def test_the_same_settings_change_nothing_and_new_ones_replace_what_comes_back() -> None:
    async with manager_of_fakes(num_workers=2) as (manager, workers):
        grants = await manager.acquire("a", Purpose.TRAINING, 2, 5)
        await manager.configure(settings(num_workers=2).model_dump(mode="json"))
        assert len(workers) == 2
        await manager.configure(settings(num_workers=1, device_options={"toasted": False}).model_dump(mode="json"))
        for grant in grants:
            await manager.release(grant.lease_id, LeaseReport())
        (grant,) = await manager.acquire("a", Purpose.TRAINING, 2, 5)
        assert grant.calls == (0, 1)
        assert [worker.killed for worker in workers] == [True, True, False]
        (device,) = (await manager.snapshot())["devices"]
        assert device["replacements"] == 0


async def test_a_manager_that_closes_kills_the_workers_that_boot_or_wait_for_their_turn() -> None:
    class NeverUp(FakeWorker):
        async def boot(self) -> str:
            await asyncio.Event().wait()
            return ""

    async with manager_of_fakes(NeverUp, num_workers=2, boots_at_once=1) as (_, workers):
        pass
    assert [worker.killed for worker in workers] == [True, True]


class SlowWorker(FakeWorker):
    """Its files take ten minutes, its boot two; it counts how many boot with it."""

    booting = 0
    most = 0

    async def prepare(self) -> None:
        await asyncio.sleep(600)

    async def boot(self) -> str:
        cls = type(self)
        cls.booting += 1
        cls.most = max(cls.most, cls.booting)
        await asyncio.sleep(120)
        cls.booting -= 1
        return "here"


def launched(kind: type[FakeWorker], _settings: DevicePoolSettings, index: int, workers_before: int) -> FakeWorker:
    return kind(index, workers_before)


@in_virtual_time
async def test_a_runner_waits_while_the_farm_gets_on_and_no_longer() -> None:
    class Stuck(SlowWorker):
        async def boot(self) -> str:
            await asyncio.sleep(3600)
            return "never"

    loop = asyncio.get_running_loop()
    for kind, waits_s in ((SlowWorker, (700, 760)), (Stuck, (700, 4000))):
        manager = DeviceManager(functools.partial(launched, kind), clock=loop.time)
        wanted = settings(num_workers=2, boot_timeout_s=130, boot_attempts=5, prepare="made:elsewhere")
        pool, began = DevicePool(manager, wanted, owner="job"), loop.time()
        if kind is Stuck:
            with pytest.raises(DeviceError, match="not up within 130 s"):
                await pool.start()
        else:
            await pool.start()
        assert waits_s[0] <= loop.time() - began <= waits_s[1]
        await pool.close()
        await manager.close()


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run, without waiting for time to pass."""
    for _ in range(count):
        await asyncio.sleep(0)


async def states_of(manager: DeviceManager) -> list[str]:
    return [device["state"] for device in (await manager.snapshot())["devices"]]


async def play(manager: DeviceManager, count: int = 1, **report: Any) -> list[Any]:
    """Lends ``count`` devices, gives them back, and returns which workers they were."""
    grants = await manager.acquire("a", Purpose.TRAINING, count, 5)
    for grant in grants:
        await manager.release(grant.lease_id, LeaseReport(**report))
    await turns()
    return [grant.calls for grant in grants]


@in_virtual_time
async def test_a_faulty_device_rests_is_probed_and_comes_back_on_probation() -> None:
    async with manager_of_fakes(num_workers=2, max_consecutive_faults=1, quarantine_s=0.1) as (manager, workers):
        await play(manager, fault="error", error="adb is offline")
        assert sorted(await states_of(manager)) == ["quarantined", "ready"]
        (resting,) = [each for each in (await manager.snapshot())["devices"] if each["state"] == "quarantined"]
        assert (resting["last_error"], resting["quarantines"], resting["replacements"]) == ("adb is offline", 1, 0)
        assert await play(manager, 2) == [(1, 0)]
        await asyncio.sleep(0.15)
        assert await states_of(manager) == ["ready", "ready"]
        assert [worker.killed for worker in workers] == [False, False]
        assert await play(manager) == [(1, 0)]
        assert await play(manager, fault="error") == [(0, 0)]
        assert [worker.killed for worker in workers] == [True, False, False]
        assert await states_of(manager) == ["ready", "ready"]


def boots_again_on_event() -> tuple[asyncio.Event, type[FakeWorker]]:
    """A kind of worker that boots at once the first time, and later only once the event is set."""
    may_boot = asyncio.Event()

    class BootsAgainOnEvent(FakeWorker):
        async def boot(self) -> str:
            if self.calls[1]:
                await may_boot.wait()
            return "here"

    return may_boot, BootsAgainOnEvent


@in_virtual_time
async def test_a_spare_stands_in_at_once_and_never_adds_to_what_is_lent() -> None:
    may_boot, kind = boots_again_on_event()
    async with manager_of_fakes(kind, num_workers=2, spare_devices=1) as (manager, _):
        assert await states_of(manager) == ["ready"] * 3
        first, second = await manager.acquire("a", Purpose.TRAINING, 5, 5)
        assert await manager.acquire("b", Purpose.TRAINING, 1, 0.01) == []
        waiting = asyncio.create_task(manager.acquire("b", Purpose.TRAINING, 2, 5))
        await turns()
        await manager.release(first.lease_id, LeaseReport(fault="died"))
        await turns(2)
        (third,) = waiting.result()
        await turns()
        assert sorted(await states_of(manager)) == ["booting", "leased", "leased"]
        await manager.release(second.lease_id, LeaseReport())
        await manager.release(third.lease_id, LeaseReport())
        may_boot.set()
        await turns()
        assert await states_of(manager) == ["ready"] * 3


@pytest.mark.parametrize("prepare", ["", "module:function"])
async def test_old_devices_are_recycled_one_after_the_other(prepare: str) -> None:
    may_boot, kind = boots_again_on_event()
    changes = {"num_workers": 3, "recycle_after_episodes": 2, "prepare": prepare}
    async with manager_of_fakes(kind, **changes) as (manager, workers):
        await play(manager, 3)
        await play(manager, 3)
        await turns()
        assert sorted(await states_of(manager)) == ["ready", "ready", "recycling"]
        assert [worker.killed for worker in workers] == [True, False, False, False]
        may_boot.set()
        await turns()
        for _ in range(10):
            await play(manager)
            assert (await states_of(manager)).count("recycling") <= 1
        assert all(worker.killed for worker in workers[:3])
        counted = (await manager.snapshot())["devices"]
        assert sum(device["recyclings"] for device in counted) == len(workers) - 3
        assert sum(device["replacements"] for device in counted) == 0


async def test_the_snapshot_says_who_has_what_and_who_waits() -> None:
    async with manager_of_fakes(num_workers=1) as (manager, _):
        await manager.acquire("training-job", Purpose.TRAINING, 1, 5)
        waiting = asyncio.create_task(manager.acquire("evaluation-job", Purpose.EVALUATION, 1, 5))
        await turns()
        snapshot = await manager.snapshot()
        assert (snapshot["pool"], snapshot["may_be_lent"]) == ("local", 1)
        assert snapshot["runners_waiting"] == {"training": 0, "evaluation": 1}
        (device,) = snapshot["devices"]
        assert (device["state"], device["leased_by"], device["workers"]) == ("leased", "training-job", 1)
        waiting.cancel()


async def test_an_evaluation_gets_its_share_from_a_training_run_that_wants_everything() -> None:
    async with manager_of_fakes(num_workers=8, evaluation_share=0.25) as (manager, _):
        held = {"training": await manager.acquire("t", Purpose.TRAINING, 99, 5), "evaluation": []}
        assert len(held["training"]) == 8
        asking = {purpose: asyncio.create_task(manager.acquire(purpose.value, purpose, 99, 60)) for purpose in Purpose}
        for _ in range(60):
            giver = max(held, key=lambda name: (len(held[name]), name))
            await manager.release(held[giver].pop(0).lease_id, LeaseReport())
            await turns()
            for purpose, task in list(asking.items()):
                if task.done():
                    held[purpose.value] += task.result()
                    asking[purpose] = asyncio.create_task(manager.acquire(purpose.value, purpose, 99, 60))
                    await turns(2)
        assert {name: len(grants) for name, grants in held.items()} == {"training": 6, "evaluation": 2}
        for task in asking.values():
            task.cancel()


# ---- the worker ------------------------------------------------------------------------------------------------------


def booted_worker() -> DeviceWorker:
    worker = DeviceWorker(settings(), 0)
    worker.boot()
    return worker


def test_a_call_under_an_older_lease_is_refused() -> None:
    worker = booted_worker()
    worker.reset(2, "Solved", 0)
    for late_call in (lambda: worker.step(1, CLICK), lambda: worker.score(1), lambda: worker.reset(1, "Solved", 0)):
        with pytest.raises(DeviceError, match="lease expired"):
            late_call()
    assert worker.step(2, CLICK).goal == "Play Solved number 0."


def test_a_mistake_in_a_device_becomes_a_device_error() -> None:
    worker = booted_worker()
    worker.reset(1, "Bug", 0)
    with pytest.raises(DeviceError, match="ZeroDivisionError: a mistake"):
        worker.step(1, CLICK)


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


async def test_the_event_loop_goes_on_while_a_device_hangs() -> None:
    async with local_pool(num_workers=1, step_timeout_s=0.5) as pool, await pool.acquire() as device:
        await device.reset("Hang", 0)
        hanging = asyncio.create_task(device.step(CLICK))
        beats = 0
        while not hanging.done():
            await asyncio.sleep(0.005)
            beats += 1
        with pytest.raises(DeviceError, match="did not finish"):
            await hanging
    assert beats > 3  # about a hundred; held up by the device it would be one


async def test_a_lost_lease_ends_the_episode_at_its_next_call() -> None:
    async with local_pool(num_workers=1) as pool, await pool.acquire() as device:
        await device.reset("Solved", 0)
        device.mark_lost()
        with pytest.raises(DeviceError, match="did not renew it in time"):
            await device.step(CLICK)


async def test_a_device_that_dies_ends_its_episode_while_the_engine_is_silent() -> None:
    async with local_pool(num_workers=1) as pool:
        start = time.monotonic()
        with pytest.raises(DeviceError, match="device-0 is gone: the fake device has died"):
            await wait_for_a_silent_engine(pool)
        assert time.monotonic() - start < 45  # the engine would be silent for a minute
        async with await pool.acquire() as device:
            await device.reset("Solved", 0)
            counters = await counters_of(pool)
        assert (counters["failures"], counters["replacements"]) == ({"died": 1}, 1)


async def wait_for_a_silent_engine(pool: LocalDevicePool) -> None:
    async with await pool.acquire() as device:
        await device.reset("Dies", 0)
        await asyncio.sleep(60)


async def test_a_device_that_dies_in_a_call_ends_the_call_and_is_counted_once() -> None:
    async with local_pool(num_workers=1) as pool, await pool.acquire() as device:
        await device.reset("Hang", 0)
        asyncio.get_running_loop().call_later(0.2, device.mark_lost)
        with pytest.raises(DeviceError, match="did not renew it in time"):
            await device.step(CLICK)
        assert device.report().failures == {"device": 1}
        await asyncio.sleep(0)


async def test_an_episode_that_ends_as_its_device_dies_keeps_what_it_has() -> None:
    async with local_pool(num_workers=1) as pool:
        async with await pool.acquire() as device:
            await device.reset("Solved", 0)
            device.mark_lost()
        async with await pool.acquire() as device:
            with contextlib.suppress(ZeroDivisionError):
                device.mark_lost()
                raise ZeroDivisionError
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


def test_a_ray_pool_needs_a_cluster() -> None:
    with pytest.raises(ConfigError, match="needs a Ray cluster"):
        create_device_pool(settings(device_pool="ray"), job_id="job", ray_address=None)
