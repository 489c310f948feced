"""Clients that keep a server waiting, in numbers, and what others notice of them.

    python -m tests.slow_clients                  # every attack on a server of its own; prints a table
    python -m tests.slow_clients --files 1024     # with so many file descriptors for each process
    python -m tests.slow_clients --attack idle

Only against a server that this program starts. An attack runs as a process of its own; ``watch`` asks for ``/health``
over new connections and writes over a few that stay, first undisturbed and then during the attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

HEAD = b"POST /buffer/write HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n\r\n"
HALF_HEAD = b"POST /buffer/write HTTP/1.1\r\nHost: localh"
READS_NOTHING = b"GET /dashboard/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40
WRITERS = 4


# --- attacking -------------------------------------------------------------------------------------------------------


async def hold(port: int, says: bytes, trickle: bytes, *, reads: bool) -> None:
    """Connects, says something, and then says a little more every second, until the server closes."""
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, says)
        while True:
            try:
                async with asyncio.timeout(1.0 if trickle or not reads else None):
                    if reads and not await loop.sock_recv(client, 4096):
                        return
                    await asyncio.sleep(0 if reads else 1.0)
            except TimeoutError:
                await loop.sock_sendall(client, trickle)
    except OSError:
        pass
    finally:
        client.close()


async def again_and_again(port: int, pause_s: float, says: bytes, trickle: bytes, *, reads: bool = True) -> None:
    """Holds a connection, and another one when the server has closed it."""
    while True:
        await hold(port, says, trickle, reads=reads)
        await asyncio.sleep(pause_s)


async def pipeline(port: int, request: bytes, at_once: int = 200) -> None:
    """Sends many requests in one go, reads what comes, and sends the next; again when the server has closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while not reader.at_eof():
                    writer.write(request * at_once)
                    await writer.drain()
                    await reader.read(65536)
            finally:
                writer.close()
        await asyncio.sleep(0.1)


async def churn(port: int) -> None:
    """Asks for health over one new connection after the other."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                await reader.read()
            finally:
                writer.close()


Attack = Callable[[int], list[Awaitable[None]]]
FLOODS = ("pipelined health", "churn")
"""They ask as fast as they are answered."""
ATTACKS: dict[str, Attack] = {
    "half heads": lambda port: [again_and_again(port, 1.0, HALF_HEAD, b"") for _ in range(33)],
    "slow readers": lambda port: [again_and_again(port, 1.0, READS_NOTHING, b"", reads=False) for _ in range(33)],
    "idle": lambda port: [again_and_again(port, 1.0, b"", b"") for _ in range(2000)],
    "many half heads": lambda port: [again_and_again(port, 1.0, HALF_HEAD, b"") for _ in range(2000)],
    "large slow bodies": lambda port: [again_and_again(port, 1.0, HEAD, b" " * 1000) for _ in range(40)],
    "reconnecting slow bodies": lambda port: [again_and_again(port, 0.0, HEAD, b" ") for _ in range(2000)],
    "pipelined health": lambda port: [
        pipeline(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(50)
    ],
    "churn": lambda port: [churn(port) for _ in range(50)],
    "everything": lambda port: [
        attacker for name, attack in ATTACKS.items() if name not in ("everything", *FLOODS) for attacker in attack(port)
    ],
}


async def run_attack(name: str, port: int) -> None:
    """Attacks until the process is ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attackers = [asyncio.ensure_future(attacker) for attacker in ATTACKS[name](port)]
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.gather(*attackers)


@contextlib.contextmanager
def attacked(name: str, port: int, lead_s: float = 2.0) -> Iterator[int]:
    """Has a process attack a server while the block runs; yields its id."""
    command = [sys.executable, "-m", "tests.slow_clients", "--attack", name, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(lead_s)
            yield process.pid
        finally:
            process.kill()


# --- watching --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What honest clients saw for a while."""

    slowest_health_s: float
    health_checks: int
    failed_health_checks: int
    writes_per_s: float
    failed_writes: int
    new_connections_per_s: float
    """Writes of one more client, over a new connection each."""


def watch(port: int, job_id: str, seconds: float, headers: dict[str, str] | None = None) -> Seen:
    """Asks for health over new connections, writes over ``WRITERS`` that stay, and over one new one after the other."""
    until = time.monotonic() + seconds
    counts: list[tuple[int, int]] = []
    anew: list[tuple[int, int]] = []

    def write(counted: list[tuple[int, int]], reconnects: bool) -> None:
        counted.append(write_until(port, job_id, until, headers or {}, reconnects=reconnects))

    writers = [threading.Thread(target=write, args=(counts, False)) for _ in range(WRITERS)]
    writers.append(threading.Thread(target=write, args=(anew, True)))
    for writer in writers:
        writer.start()
    times, failed = [], 0
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
                ok = request(connection, "GET", "/health") == 200
        except OSError:
            ok = False
        failed += not ok
        times.append(time.monotonic() - began)
        time.sleep(0.05)
    for writer in writers:
        writer.join()
    return Seen(
        slowest_health_s=max(times),
        health_checks=len(times),
        failed_health_checks=failed,
        writes_per_s=sum(done for done, _ in counts) / seconds,
        failed_writes=sum(failed for _, failed in [*counts, *anew]),
        new_connections_per_s=sum(done for done, _ in anew) / seconds,
    )


_numbers = itertools.count()
TRIES = 2


def write_until(
    port: int, job_id: str, until: float, headers: dict[str, str], *, reconnects: bool = False
) -> tuple[int, int]:
    """Writes small items one after the other; returns how many were kept, and how often that failed.

    A connection that is closed is opened again at once, as any client does: on a starved machine this program may take
    longer to send its request than the server lets a newcomer keep others out.
    """
    done = failed = 0
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    while time.monotonic() < until:
        uid = f"honest-{time.monotonic_ns()}-{next(_numbers)}"
        messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4" * 1000}]
        item = {"uid": uid, "instance_id": uid, "messages": messages, "reward": 1.0, "job_id": job_id}
        kept = False
        for _ in range(TRIES):
            try:
                kept = request(connection, "POST", "/buffer/write", json.dumps(item).encode(), headers) == 200
                break
            except OSError:
                connection.close()
        done, failed = done + kept, failed + (not kept)
        if reconnects:
            connection.close()
    connection.close()
    return done, failed


def request(
    connection: HTTPConnection, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> int:
    """Returns the status of a reply, which is read."""
    connection.request(method, path, body, headers or {})
    reply = connection.getresponse()
    reply.read()
    return reply.status


# --- the program -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Attacks a server, or starts one and tells what each attack does to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--port", type=int, help="attack this server until ended")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--files", type=int, help="file descriptors of each of the server's processes")
    given = parser.parse_args()
    if given.port is not None:
        asyncio.run(run_attack(given.attack, given.port))
        return
    names = [given.attack] if given.attack else list(ATTACKS)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            say(name, *measured(name, Path(folder), given.seconds, given.files))


def measured(name: str, folder: Path, seconds: float, files: int | None) -> tuple[Seen, Seen, float, float]:
    """Returns what honest clients see of a server before an attack and during it, and the processors that attack and
    server take meanwhile."""
    from tests.integration.conftest import BufferProcess

    launcher = () if files is None else ("prlimit", f"--nofile={files}:{files}")
    buffer = BufferProcess(folder, launcher=launcher)
    try:
        buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "honest"})
        before = watch(buffer.port, "honest", seconds)
        with attacked(name, buffer.port) as attacker:
            used = [processor_s(attacker), processor_s(buffer.process.pid)]
            began = time.monotonic()
            during = watch(buffer.port, "honest", seconds)
            took = time.monotonic() - began
            attack, server = (
                (processor_s(pid) - at_first) / took
                for pid, at_first in zip((attacker, buffer.process.pid), used, strict=True)
            )
            return before, during, attack, server
    finally:
        buffer.stop()


def processor_s(pid: int) -> float:
    """Returns the processor time that a process and its descendants have used."""
    parents = {}
    used = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text("utf-8", "replace").rsplit(")", 1)[1].split()
            parents[int(stat.parent.name)] = int(fields[1])
            used[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(member, 0.0) for member in family)


def say(name: str, before: Seen, during: Seen, attack: float, server: float) -> None:
    """Prints a line of the table."""
    ratio = during.writes_per_s / max(before.writes_per_s, 1e-9)
    new_ratio = during.new_connections_per_s / max(before.new_connections_per_s, 1e-9)
    sys.stdout.write(
        f"{name:26} /health at most {1000 * before.slowest_health_s:.0f} → {1000 * during.slowest_health_s:.0f} ms "
        f"({during.failed_health_checks} of {during.health_checks} failed), writes {before.writes_per_s:.0f} → "
        f"{during.writes_per_s:.0f} /s ({ratio:.2f}), each over a new connection {before.new_connections_per_s:.0f} → "
        f"{during.new_connections_per_s:.0f} /s ({new_ratio:.2f}), {during.failed_writes} failed; "
        f"processors: attack {attack:.2f}, server {server:.2f}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
