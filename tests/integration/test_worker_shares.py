"""Connections are shared out over the workers of a real server."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.conftest import BufferProcess, process_table, wait_until

StartBuffer = Callable[..., BufferProcess]
pytestmark = pytest.mark.timeout(120)

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
ESTABLISHED = "01"


def workers(buffer: BufferProcess) -> list[int]:
    """The gunicorn workers: grandchildren of the supervisor."""
    masters = {pid for pid, command in buffer.children().items() if "gunicorn" in command}
    return [pid for pid, parent, _ in process_table() if parent in masters]


def connections_of(pid: int, port: int) -> int:
    """How many clients' connections to the port a process holds."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == ESTABLISHED}
    held = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held += os.readlink(descriptor).removeprefix("socket:[").removesuffix("]") in inodes
        except FileNotFoundError:
            continue
    return held


def shares(buffer: BufferProcess) -> dict[int, int]:
    """How many connections each worker has."""
    return {pid: connections_of(pid, buffer.port) for pid in workers(buffer)}


def all_serve(buffer: BufferProcess, count: int, held: ExitStack) -> None:
    """Waits until every worker has a connection: they start one after the other."""

    def each_has_one() -> bool:
        ask(held.enter_context(connected(buffer)))
        found = shares(buffer)
        return len(found) == count and min(found.values()) > 0

    wait_until(each_has_one, 60, "a connection for every worker")


def connected(buffer: BufferProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", buffer.port), timeout=60)


def ask(connection: socket.socket) -> None:
    """Is answered on a connection, which stays."""
    connection.sendall(REQUEST)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_new_connections_go_to_the_worker_that_has_fewer_and_one_that_is_stuck_is_not_waited_for(
    start_buffer: StartBuffer,
) -> None:
    buffer = start_buffer("--workers", "2")
    with ExitStack() as held:
        all_serve(buffer, 2, held)
        stuck, serves = workers(buffer)
        os.kill(stuck, signal.SIGSTOP)
        try:
            for _ in range(20):
                ask(held.enter_context(connected(buffer)))
            before = shares(buffer)
        finally:
            os.kill(stuck, signal.SIGCONT)
        assert before[serves] - before[stuck] > 10
        for _ in range(10):
            ask(held.enter_context(connected(buffer)))
        after = shares(buffer)
    assert after[stuck] - before[stuck] >= 8, (before, after)  # whoever woke first took them before
