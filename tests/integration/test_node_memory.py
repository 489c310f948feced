"""A node that runs out of memory loses a device, with that reason, and neither the device manager nor all workers."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.devices.ray_cluster.pool import MANAGER_NAME, NAMESPACE, RayDevicePool
from slime_plugins.rollout_buffer.errors import DeviceError
from tests.integration.ray_processes import LOCAL_RAY, ON_RAY, pool_at, token_in
from tests.memory_eater import ADDRESS, EMULATORS
from tests.waiting import wait_until

_WITH_MOUNTS_OF_ITS_OWN = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
"""A command whose script may mount a file over /proc/meminfo, for itself alone."""
_MAY_UNSHARE = (
    shutil.which("unshare") and not subprocess.run([*_WITH_MOUNTS_OF_ITS_OWN, "true"], check=False).returncode
)
_IN_USE_AT_FIRST, _GROWTH_PER_S = 0.85, 0.005
"""Two emulators reach the limit in ten seconds, and one of them alone stays below Ray's for as long again."""

pytestmark = [
    *ON_RAY,
    pytest.mark.large,
    pytest.mark.skipif(not _MAY_UNSHARE, reason="no mount namespace can be made here"),
    pytest.mark.timeout(180),
]


def write_meminfo(path: Path, emulators: Path) -> None:
    """Writes this machine's memory as it would be with these emulators, each of which takes ever more."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = int(lines[0].split()[1])
    living = [one for one in emulators.iterdir() if Path("/proc", one.name).exists()]
    used = _IN_USE_AT_FIRST + sum(_GROWTH_PER_S * (time.time() - one.stat().st_mtime) for one in living)
    sizes = {"MemFree": total * (1 - used), "MemAvailable": total * (1 - used), "Buffers": 0, "Cached": 0}
    named = [(line.partition(":")[0], line.split()[1]) for line in lines]
    text = "".join(f"{name}: {int(sizes.get(name, value)):>16} kB\n" for name, value in named)
    with path.open("r+" if path.exists() else "w") as file:  # in place: it is mounted
        file.write(text)


@pytest.fixture
def cluster_with_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its Ray and its devices read how much memory is in use from a file of this test."""
    address, meminfo = tmp_path / "address", tmp_path / "meminfo"
    (emulators := tmp_path / "emulators").mkdir()
    monkeypatch.setenv(EMULATORS, str(emulators))
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]  # the device of this test, too
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    hide = f'mount --bind {meminfo} /proc/meminfo && mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
    ray = [*LOCAL_RAY, "--num-cpus", "2", "--address-file", str(address)]
    write_meminfo(meminfo, emulators)
    is_over = threading.Event()

    def keep_writing() -> None:
        while not is_over.wait(0.1):
            write_meminfo(meminfo, emulators)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    with token_in(tmp_path):
        process = subprocess.Popen([*_WITH_MOUNTS_OF_ITS_OWN, hide, "sh", *ray])
        try:
            wait_until(address.exists, 120, "the start of Ray")
            yield address.read_text()
        finally:
            process.terminate()
            assert process.wait(timeout=60) == 0
            is_over.set()
            writer.join()


async def episode(pool: RayDevicePool) -> None:
    async with await pool.acquire() as device:
        await device.reset("Solved", 0)
        await asyncio.sleep(60)


async def test_a_device_is_given_up_before_ray_ends_manager_and_workers(cluster_with_memory_of_its_own: str) -> None:
    cluster, reserved = cluster_with_memory_of_its_own, {"memory": 50_000_000}
    async with pool_at(cluster, kind=ADDRESS, num_workers=2, resources_per_worker=reserved, boot_pause_s=1) as pool:
        ray = importlib.import_module("ray")
        manager = ray.get_actor(MANAGER_NAME, namespace=NAMESPACE)
        before = await manager.__ray_call__.remote(lambda _: os.getpid())
        # Each device has an emulator: whichever is given up frees memory.
        episodes = [asyncio.create_task(episode(pool)) for _ in range(2)]
        await asyncio.wait(episodes, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(DeviceError, match=r"the node's memory is \d+% in use"):
            next(one for one in episodes if one.done()).result()
        for one_episode in episodes:
            one_episode.cancel()
        assert await manager.__ray_call__.remote(lambda _: os.getpid()) == before
        async with await pool.acquire() as one:
            assert one.device_id in ("device-0", "device-1")
        counters = await pool.counters()
        assert sorted(device["replacements"] for device in counters) in ([0, 0], [0, 1])
