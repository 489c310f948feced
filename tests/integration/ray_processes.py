"""Ray as processes of this machine: the project's own local Ray, and nodes that are killed as if switched off."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from tests.processes import descendants
from tests.waiting import wait_until

LOCAL_RAY = [sys.executable, "-m", "slime_plugins.rollout_buffer.supervisor.local_ray"]
ON_RAY = [
    pytest.mark.slow,
    # Not imported here: Ray reads its token's place when it is imported, and the cluster is not up yet.
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    # Ray leaves sockets and subprocesses to the garbage collector, and announces its own future changes.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def token_in(folder: Path) -> Iterator[None]:
    """Ray's processes, and this one as their client, have a token of the test's own."""
    path = folder / "token"
    path.write_text("a secret of this test\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "token")
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        yield


@contextmanager
def local_ray(folder: Path, cpus: int = 1) -> Iterator[str]:
    """A local Ray with a token; yields its address, and asserts that it exits with 0."""
    address = folder / "address"
    with token_in(folder):
        command = [*LOCAL_RAY, "--num-cpus", str(cpus), "--address-file", str(address)]
        process = ChildProcess("Ray", command, log_file=folder / "ray.log")
        try:
            wait_until(address.exists, 120, "the start of Ray")
            yield address.read_text(encoding="utf-8").strip()
        finally:
            process.stop(60)
        assert process.exit_code() == 0


class RayProcess:
    """``ray start --block`` with more arguments. Ends with everything it started, by process id."""

    def __init__(self, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *arguments]
        command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        for _ in range(3):  # Ray gives up when its parts take more than 30 s to find each other
            with log.open("wb") as file:
                self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            while self.process.poll() is None:
                if b"Ray runtime started" in log.read_bytes():
                    return
                time.sleep(0.1)
            self.kill()
        raise AssertionError(log.read_text())

    def kill(self) -> None:
        """Kills its own processes at once, as when its machine is switched off; workers follow by themselves."""
        for process in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def phones(count: int) -> list[str]:
    """The arguments of a node that has so many of the resource ``phone``."""
    return ["--resources", json.dumps({"phone": count})]


@asynccontextmanager
async def pool_at(address: str, owner: str = "job", **settings: Any) -> AsyncIterator[RayDevicePool]:
    """A pool of fake devices, unless the settings say otherwise."""
    wanted = DevicePoolSettings.model_validate({"kind": ADDRESS} | settings)
    pool = RayDevicePool(wanted, ray_address=address, owner=owner)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
