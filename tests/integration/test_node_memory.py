"""A node that runs out of memory loses a device, with that reason, and neither the device manager nor all workers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.devices.ray_cluster.node_memory import used_share
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import MANAGER_NAME, NAMESPACE, RayDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, WorkerResources
from slime_plugins.rollout_buffer.errors import DeviceError
from tests.memory_eater import ADDRESS

pytestmark = [
    pytest.mark.large,  # its limit is 10 % above the machine's memory in use: tests beside it may use as much
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ray's monitor ends workers once 10 % of the machine's memory more than now is in use."""
    token, address = tmp_path / "token", tmp_path / "address"
    token.write_text("a secret of this test\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{used_share() + 0.1:.3f}")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]  # the device of this test, too
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.supervisor.local_ray", "--num-cpus", "2"]
    process = subprocess.Popen([*command, "--address-file", str(address)])
    try:
        deadline = time.monotonic() + 120
        while not address.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield address.read_text()
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


async def episode(pool: RayDevicePool) -> None:
    async with await pool.acquire() as device:
        await device.reset("Solved", 0)
        await asyncio.sleep(60)


async def test_a_device_is_given_up_before_ray_ends_manager_and_workers(cluster_with_little_memory: str) -> None:
    reserved = WorkerResources(memory=50_000_000)
    settings = DevicePoolSettings(kind=ADDRESS, num_workers=2, resources_per_worker=reserved, boot_pause_s=1)
    pool = RayDevicePool(settings, ray_address=cluster_with_little_memory, owner="job")
    await pool.start()
    try:
        ray = importlib.import_module("ray")
        manager = ray.get_actor(MANAGER_NAME, namespace=NAMESPACE)
        before = await manager.__ray_call__.remote(lambda _: os.getpid())
        with pytest.raises(DeviceError, match=r"the node's memory is \d+% in use"):
            await episode(pool)
        assert await manager.__ray_call__.remote(lambda _: os.getpid()) == before
        async with await pool.acquire() as one:
            assert one.device_id in ("device-0", "device-1")
        counters = await pool.counters()
        assert sorted(device["replacements"] for device in counters) in ([0, 0], [0, 1])
    finally:
        await pool.close()
