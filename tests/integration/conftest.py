"""Real processes for integration tests: a buffer, a scripted engine, each on a port and a folder of its own."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port, free_ports
from tests.held_sockets import HeldSockets
from tests.processes import children_of, descendants, is_alive
from tests.waiting import wait_until

ROLLOUT_BUFFER = [sys.executable, "-m", "slime_plugins.rollout_buffer"]
"""The command line."""


ANDROID_WORLD_PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_ANDROID_WORLD", "")
needs_android_world = pytest.mark.skipif(
    not ANDROID_WORLD_PYTHON, reason="ROLLOUT_BUFFER_TEST_ANDROID_WORLD names no python with the android_world package"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own folders are too deep for the sockets of Unix, and for names in the first cluster of a disk."""
    with tempfile.TemporaryDirectory(prefix="aw_") as path:
        yield Path(path)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def engine_url_of(variable: str) -> str:
    """The URL of the engine in the environment ``variable``; skips the test, with the reason, when there is none."""
    url = os.environ.get(variable, "").rstrip("/")
    if not url:
        pytest.skip(f"{variable} is not set")
    if not answers(f"{url}/model_info"):
        pytest.skip(f"no engine answers at {variable}={url}")
    return url


@contextmanager
def running(name: str, port: int, command: Sequence[str], folder: Path) -> Iterator[ChildProcess]:
    """A program from its first answer to ``/health`` on, with its log in a folder."""
    process = ChildProcess(name, [*command, "--port", str(port)], log_file=folder / f"{name}.log")
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, f"start of {name}\n{process.log_tail(20)}")
        yield process
    finally:
        process.stop(40)


@contextmanager
def scripted_engine(folder: Path, *arguments: str) -> Iterator[int]:
    """A scripted engine in a process of its own; yields its port."""
    port = free_port()
    with running("engine", port, [*ROLLOUT_BUFFER, "engine", *arguments], folder):
        yield port


class BufferProcess:
    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        gateway: bool = False,
        held: bool = False,
    ) -> None:
        """``launcher`` is a command that runs the one after it. With ``held`` this process holds the sockets."""
        self.folder = folder
        self.port, gateway_port = free_ports(2)
        self._held = HeldSockets([self.port, gateway_port]) if held else None
        self._launcher = launcher if self._held is None else self._held.launcher
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = RolloutBufferClient(self.url, timeout_s=30)
        self.gateway_url = f"http://127.0.0.1:{gateway_port}" if gateway else ""
        self._arguments = (*arguments, "--gateway-port", str(gateway_port)) if gateway else arguments
        self._environment = environment or {}
        self.start()

    def start(self) -> None:
        """Starts ``serve``, each time on the same port and data, and waits for its first answer."""
        command = [
            *self._launcher, *ROLLOUT_BUFFER, "serve", "--port", str(self.port),
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
        for url in filter(None, (self.url, self.gateway_url)):
            wait_until(partial(answers, f"{url}/health"), 60, f"an answer of {url}\n{self.process.log_tail(20)}")

    def stop(self) -> None:
        self.process.stop(40)
        if self._held is not None:
            self._held.close()

    def kill_supervisor(self, *, awaits_orphans: bool = True) -> None:
        """Kills the supervisor as a crash would; with ``awaits_orphans``, returns when all below it have ended, too."""
        orphans = list(descendants(self.process.pid)) if awaits_orphans else []
        os.kill(self.process.pid, signal.SIGKILL)
        wait_until(lambda: self.process.exit_code() is not None, what="death of the supervisor")
        wait_until(lambda: not any(map(is_alive, orphans)), 60, "end of what the supervisor had started")

    def kill_server(self) -> None:
        """Kills gunicorn as a crash would. Returns when its last worker, which may answer once more, has ended too
        and another server answers."""
        parent = self.child("-m gunicorn")
        orphans = [parent, *descendants(parent)]
        os.kill(parent, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, orphans)), 60, "end of the server's last worker")
        wait_until(lambda: answers(f"{self.url}/health"), 60, "another server")

    def children(self) -> dict[int, str]:
        """The processes that the supervisor parents, by id, with their command lines."""
        return children_of(self.process.pid)

    def child(self, words: str) -> int:
        """The child whose command line has these words; waits for it."""
        found: int = wait_until(
            lambda: next((pid for pid, command in self.children().items() if words in command), None),
            60,
            f"a process of {words}",
        )
        return found

    def runner_pid(self) -> int:
        return self.child("runner.main")


def server_workers(buffer: BufferProcess) -> list[int]:
    """The gunicorn workers: grandchildren of the supervisor."""
    masters = [pid for pid, command in buffer.children().items() if "-m gunicorn" in command]
    return sorted(pid for master in masters for pid in children_of(master))


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
    """The process behind ``served``; a file may define a fixture of this name to start it with other settings."""
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
    with scripted_engine(tmp_path_factory.mktemp("engine"), "--skill", "0.5") as port:
        yield port
