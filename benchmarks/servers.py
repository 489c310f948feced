"""Servers of the benchmarks, each a process: started, waited for, and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


def serve_command(port: int, folder: Path, *options: str) -> list[str]:
    """Returns the command of a rollout buffer with its data in ``folder``."""
    serve = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(port)]
    return [*serve, "--data-dir", str(folder / "data"), *options]


@contextmanager
def running(
    command: Sequence[str], log: Path, is_up: Callable[[], bool], **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server, waits until it is up, and stops it afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **environment}
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[2]} does not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()


def is_healthy(port: int) -> bool:
    """Returns True if a server's health route succeeds."""
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.RequestException:
        return False


def listens(port: int) -> bool:
    """Returns True if the port accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
