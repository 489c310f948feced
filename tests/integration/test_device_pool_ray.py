"""The device pool on a real Ray cluster of its own: leases, deaths, several runners, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device import Action, ActionKind
from slime_plugins.rollout_buffer.generator.android_world.device_pool import NAMESPACE, REGISTRY_NAME, RayDevicePool
from slime_plugins.rollout_buffer.generator.android_world.scripted_device import ADDRESS

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    # Ray leaves sockets and subprocesses to the garbage collector, and announces its own future changes.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LOCAL_RAY = "slime_plugins.rollout_buffer.generator.android_world.local_ray"
CLICK = Action(kind=ActionKind.CLICK, point=(1, 1))


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, "local Ray ended before it was up"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address_file = tmp_path_factory.mktemp("ray") / "address"
    command = [sys.executable, "-m", LOCAL_RAY, "--num-cpus", "2", "--address-file", str(address_file)]
    process = subprocess.Popen(command)
    try:
        yield wait_for(address_file, process)
    finally:
        ray.shutdown()
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert not address_file.exists()
        assert not processes_below(process.pid)


def processes_below(group: int) -> list[str]:
    """Returns the command lines of living processes whose Ray files belong to the cluster that was started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == group and stat[0] != "Z":
                found.append(entry.name)
    return found


def is_alive(process: str) -> bool:
    return Path(f"/proc/{process}").exists()


def settings(**changes: Any) -> AndroidWorldSettings:
    return AndroidWorldSettings.model_validate({"device": ADDRESS, "num_workers": 2, "lease_timeout_s": 2} | changes)


@asynccontextmanager
async def pool_at(address: str, owner: str = "job", **changes: Any) -> AsyncIterator[RayDevicePool]:
    pool = RayDevicePool(settings(**changes), ray_address=address, owner=owner)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_episodes_play_at_once_on_devices_in_other_processes(cluster: str) -> None:
    pids: set[str] = set()

    async with pool_at(cluster) as pool:

        async def episode(number: int) -> float:
            async with await pool.acquire() as device:
                observation = await device.reset("Solved", number)
                assert observation.goal == f"Play Solved number {number}."
                pids.add(observation.details["pid"])
                await device.step(CLICK)
                return await device.score()

        assert await asyncio.gather(*(episode(number) for number in range(200))) == [1.0] * 200
        counters = await pool.counters()
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert sum(device["episodes"] for device in counters) >= 198


async def test_the_next_runner_finds_the_same_devices(cluster: str) -> None:
    seen = []
    for owner in ("first", "second"):
        async with pool_at(cluster, owner) as pool, await pool.acquire() as one, await pool.acquire() as other:
            seen.append({(await device.reset("Solved", 0)).details["pid"] for device in (one, other)})
    assert seen[0] == seen[1]


async def test_errors_of_a_device_arrive_as_they_were_raised(cluster: str) -> None:
    async with pool_at(cluster) as pool, await pool.acquire() as device:
        with pytest.raises(EnvironmentSetupError, match="there is no task NoSuch"):
            await device.reset("NoSuch", 0)
        await device.reset("Offline", 0)
        with pytest.raises(DeviceError, match="the scripted device is offline"):
            await device.step(CLICK)
        await device.reset("Bug", 0)
        with pytest.raises(DeviceError, match="ZeroDivisionError"):
            await device.step(CLICK)


async def test_a_worker_that_dies_costs_one_attempt_and_is_replaced(cluster: str) -> None:
    async with pool_at(cluster) as pool:
        async with await pool.acquire() as device:
            await device.reset("Exit", 0)
            with pytest.raises(DeviceError, match="a device worker is gone"):
                await device.step(CLICK)
            lost = device.device_id
        async with await pool.acquire() as one, await pool.acquire() as other:
            assert {one.device_id, other.device_id} == {"device-0", "device-1"}
            for device in (one, other):
                await device.reset("Solved", 0)
            counters = {entry["device_id"]: entry for entry in await pool.counters()}
    assert counters[lost]["failures"]["died"] == 1
    assert counters[lost]["replacements"] == 1


async def test_a_hung_worker_is_killed_and_replaced(cluster: str) -> None:
    async with pool_at(cluster, num_workers=1, step_timeout_s=1) as pool:
        async with await pool.acquire() as device:
            hung = (await device.reset("Hang", 0)).details["pid"]
            with pytest.raises(DeviceError, match="did not finish"):
                await device.step(CLICK)
        async with await pool.acquire() as device:
            assert (await device.reset("Solved", 0)).details["pid"] != hung
        assert not is_alive(hung)


VICTIM = (
    "import asyncio, sys\n"
    "from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings\n"
    "from slime_plugins.rollout_buffer.generator.android_world.device_pool import RayDevicePool\n"
    "async def main():\n"
    "    settings = AndroidWorldSettings.model_validate_json(sys.argv[2])\n"
    "    pool = RayDevicePool(settings, ray_address=sys.argv[1], owner='victim')\n"
    "    await pool.start()\n"
    "    held = [await pool.acquire() for _ in range(settings.num_workers)]\n"
    "    sys.stdout.write('holding\\n')\n"
    "    sys.stdout.flush()\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(main())\n"
)


def start_victim(address: str) -> subprocess.Popen[bytes]:
    """Starts a runner in a process of its own that holds every device and does nothing."""
    command = [sys.executable, "-c", VICTIM, address, settings().model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def test_what_a_killed_runner_held_comes_back_when_its_lease_ends(cluster: str) -> None:
    victim = start_victim(cluster)
    assert victim.stdout is not None
    assert await asyncio.to_thread(victim.stdout.readline) == b"holding\n"
    async with pool_at(cluster, acquire_timeout_s=30) as pool:
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(3)
        assert not waiting.done(), "a living runner lost its lease"
        victim.send_signal(signal.SIGKILL)
        async with await waiting as device:
            await device.reset("Solved", 0)
    victim.wait()
    victim.stdout.close()


async def test_a_registry_that_dies_comes_back_with_fresh_devices(cluster: str) -> None:
    async with pool_at(cluster) as pool, await pool.acquire() as device:
        before = (await device.reset("Solved", 0)).details["pid"]
        registry = ray.get_actor(REGISTRY_NAME, namespace=NAMESPACE)
        ray.kill(registry, no_restart=False)
        async with await pool.acquire() as other:
            assert (await other.reset("Solved", 0)).details["pid"] != before
        with pytest.raises(DeviceError):
            await device.step(CLICK)


async def test_the_loop_goes_on_while_devices_are_slow(cluster: str) -> None:
    longest_pause = 0.0

    async def watch() -> None:
        nonlocal longest_pause
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.01)
            longest_pause = max(longest_pause, time.monotonic() - start)

    async with pool_at(cluster) as pool:

        async def episode() -> None:
            async with await pool.acquire() as device:
                await device.reset("Slow", 0)
                await device.step(CLICK)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(*(episode() for _ in range(4)))
        watcher.cancel()
    assert longest_pause < 0.4


def test_local_ray_ends_with_its_parent(tmp_path: Path) -> None:
    address_file = tmp_path / "address"
    shell = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-m', '{LOCAL_RAY}', "
            f"'--num-cpus', '1', '--address-file', {str(address_file)!r}])",
        ]
    )
    wait_for(address_file, shell)
    (child,) = processes_below(shell.pid)
    shell.kill()
    shell.wait()
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(child)
    assert not address_file.exists()
