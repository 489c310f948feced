"""A Ray head that is killed and started again at its address: the runner joins the new cluster and plays on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from tests.integration.conftest import descendants

pytestmark = [
    pytest.mark.large,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(300),
    # Ray leaves sockets and subprocesses to the garbage collector, and announces its own future changes.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class RayProcess:
    """``ray start --block`` with more arguments. Ends with everything it started, by process id."""

    def __init__(self, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
        command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        while b"Ray runtime started" not in log.read_bytes():
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills all of its processes at once, as when its machine is switched off."""
        for process in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


async def test_a_runner_joins_a_restarted_head_again_and_waits_for_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a secret of this test\n", encoding="utf-8")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    node = importlib.import_module("ray.util").get_node_ip_address()
    port = free_port()
    client = f"--ray-client-server-port={free_port()}"
    start_head = ["--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false", client]
    offer = ["--resources", json.dumps({"phone": 1})]
    resources = {"num_cpus": 0.1, "custom": {"phone": 1}}
    settings = {"kind": ADDRESS, "num_workers": 1, "boot_timeout_s": 120, "resources_per_worker": resources}
    pool = RayDevicePool(DevicePoolSettings.model_validate(settings), ray_address=f"{node}:{port}", owner="job")
    with contextlib.ExitStack() as started:
        head = await asyncio.to_thread(RayProcess, tmp_path / "head", *start_head, *offer)
        started.callback(head.kill)
        try:
            await pool.start()
            head.kill()
            head = await asyncio.to_thread(RayProcess, tmp_path / "head", *start_head)
            started.callback(head.kill)
            waiting = asyncio.create_task(pool.acquire())
            await asyncio.sleep(10)  # the new head has no node with a phone yet
            late = await asyncio.to_thread(
                RayProcess, tmp_path / "node", f"--address={node}:{port}", "--num-cpus=1", *offer
            )
            started.callback(late.kill)
            async with asyncio.timeout(120):
                async with await waiting as device:
                    assert (await device.reset("Solved", 0)).goal == "Play Solved number 0."
        finally:
            await pool.close()
