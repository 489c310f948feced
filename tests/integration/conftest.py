"""Real processes for integration tests: a buffer, a scripted engine, each on a port and a folder of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.held_sockets import HeldSockets


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "it") -> Any:
    """Returns the condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def server_at(variable: str) -> str:
    """The engine that ``variable`` names; skips the test, with the reason, when there is none."""
    url = os.environ.get(variable, "").rstrip("/")
    if not url:
        pytest.skip(f"{variable} is not set")
    if not answers(f"{url}/model_info"):
        pytest.skip(f"no engine answers at {variable}={url}")
    return url


class BufferProcess:
    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        held_port: int | None = None,
    ) -> None:
        """``launcher`` is a command that runs the one after it. With ``held_port``, the gateway's, this process holds
        the sockets of ``serve``."""
        self.folder = folder
        self.port = free_port()
        self._held = None if held_port is None else HeldSockets([self.port, held_port])
        self._launcher = launcher if self._held is None else self._held.launcher
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = RolloutBufferClient(self.url, timeout_s=30)
        self._arguments = arguments
        self._environment = environment or {}
        self.start()

    def start(self) -> None:
        """Starts it, again on the same port and data, and waits until it is well."""
        command = [
            *self._launcher, sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(self.port),
            "--data-dir", str(self.folder / "data"), "--data-root", str(self.folder), *self._arguments,
        ]  # fmt: skip
        log = self.folder / "serve.log"
        self.process = ChildProcess(
            "buffer",
            command,
            log_file=log,
            environment=self._environment,
            descriptors=() if self._held is None else self._held.descriptors,
        )
        wait_until(lambda: answers(f"{self.url}/health"), 60, f"start of the buffer\n{self.process.log_tail(20)}")

    def stop(self) -> None:
        self.process.stop(40)
        if self._held is not None:
            self._held.close()

    def kill_supervisor(self, *, awaits_orphans: bool = True) -> None:
        """As a crash would: no chance to tidy up. Its children fall with it, and have when this returns."""
        orphans = descendants(self.process.pid) if awaits_orphans else []
        os.kill(self.process.pid, signal.SIGKILL)
        wait_until(lambda: self.process.exit_code() is not None, what="death of the supervisor")
        wait_until(lambda: not any(map(is_alive, orphans)), 60, "end of what the supervisor had started")

    def kill_server(self) -> None:
        """Kills gunicorn as a crash would. Returns when its last worker, which may answer once more, has ended too
        and another server answers."""
        (parent,) = (pid for pid, command in self.children().items() if "gunicorn" in command)
        orphans = [parent, *descendants(parent)]
        os.kill(parent, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, orphans)), 60, "end of the server's last worker")
        wait_until(lambda: answers(f"{self.url}/health"), 60, "another server")

    def children(self) -> dict[int, str]:
        """The processes that the supervisor parents, by id, with their command lines."""
        return {pid: command for pid, parent, command in process_table() if parent == self.process.pid}

    def runner_pid(self) -> int:
        found: int = wait_until(
            lambda: next((pid for pid, command in self.children().items() if "runner.main" in command), None),
            what="a runner",
        )
        return found


def process_table() -> list[tuple[int, int, str]]:
    """Every process as (id, parent, command line)."""
    table = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except (OSError, IndexError):
                continue
            table.append((int(folder.name), parent, command))
    return table


def server_workers(buffer: BufferProcess) -> list[int]:
    """The gunicorn workers: grandchildren of the supervisor."""
    masters = {pid for pid, command in buffer.children().items() if "gunicorn" in command}
    return sorted(pid for pid, parent, _ in process_table() if parent in masters)


def descendants(pid: int) -> list[int]:
    """The processes under a process, its children first."""
    table = process_table()
    found = [pid]
    for ancestor in found:
        found += [child for child, parent, _ in table if parent == ancestor]
    return found[1:]


def is_alive(pid: int) -> bool:
    """Returns True if a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start_buffer(tmp_path: Path) -> Iterator[Callable[..., BufferProcess]]:
    started: list[BufferProcess] = []

    def start(*arguments: str, **options: Any) -> BufferProcess:
        started.append(BufferProcess(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def shared_buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """What ``served`` is; a file may put one of its own in its place."""
    found = BufferProcess(tmp_path_factory.mktemp("served"), "--data-root", str(tmp_path_factory.getbasetemp()))
    yield found
    found.stop()


@pytest.fixture
def served(shared_buffer: BufferProcess) -> Iterator[BufferProcess]:
    """A buffer with ordinary settings, for tests that harm no process of it and name their jobs by names of their own.

    Input files may be anywhere in the folders of this run. A test's jobs are cancelled and emptied after it: a job with
    groups that are ready stays open for whoever names none.
    """
    yield shared_buffer
    client = shared_buffer.client
    for job in client.jobs():
        if job["state"] not in ("finished", "failed", "cancelled"):
            client.cancel(job["job_id"])
        while client.job(job["job_id"])["groups"].get("ready"):
            client.get_rollout_data(job_id=job["job_id"])


@pytest.fixture(scope="session")
def stand_in_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A scripted engine for the whole session; yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "engine", "--port", str(port), "--skill", "0.5"]
    process = ChildProcess("engine", command, log_file=tmp_path_factory.mktemp("engine") / "engine.log")
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, "start of the scripted engine")
    yield port
    process.stop(10)
