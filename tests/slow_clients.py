"""Attacks by slow clients on a server that a test has started, directly or behind nginx.

``python -m tests.slow_clients ATTACK PORT`` attacks until it is ended. ``ATTACKS`` has the names.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
HALF_HEAD = b"POST /buffer/write HTTP/1.1\r\nHost: localh"
MANY_REQUESTS = b"GET /dashboard/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40
"""Their replies are larger than the buffers of a connection, so a client that reads nothing blocks the server."""


async def hold(port: int, first_bytes: bytes, trickle: bytes = b"", *, reads: bool = True) -> None:
    """Connects, sends ``first_bytes``, then ``trickle`` every second until the server closes, and begins again."""
    while True:
        with contextlib.suppress(OSError):
            client = socket.socket()
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with client:
                await connect(client, port)
                await asyncio.get_running_loop().sock_sendall(client, first_bytes)
                while await still_open(client, reads=reads):
                    await asyncio.get_running_loop().sock_sendall(client, trickle)
        await asyncio.sleep(1)


async def still_open(client: socket.socket, *, reads: bool) -> bool:
    """Waits a second and returns True; a client that reads gets False as soon as the server has closed."""
    try:
        async with asyncio.timeout(1.0):
            if not reads:
                await asyncio.Event().wait()
            while await asyncio.get_running_loop().sock_recv(client, 4096):
                pass
    except TimeoutError:
        return True
    return False


async def vanish(port: int, path: bytes) -> None:
    """Sends half of a body and resets its connection, again and again."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as client:
            client.setblocking(False)
            # A close that lingers for 0 s sends a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await connect(client, port)
            await asyncio.get_running_loop().sock_sendall(client, HEAD % (path, 60_000) + b" " * 30_000)
            await asyncio.sleep(0.2)
        await asyncio.sleep(0)


async def connect(client: socket.socket, port: int) -> None:
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))


Attack = Callable[[int], list[Awaitable[None]]]
ATTACKS: dict[str, Attack] = {
    "half heads": lambda port: [hold(port, HALF_HEAD, b"a") for _ in range(1000)],
    "slow bodies": lambda port: [hold(port, HEAD % (b"/buffer/write", 200_000_000), b" ") for _ in range(500)],
    "slow bodies for threads": lambda port: [hold(port, HEAD % (b"/start_rollout", 60_000), b" ") for _ in range(500)],
    "slow readers": lambda port: [hold(port, MANY_REQUESTS, reads=False) for _ in range(100)],
    "idle connections": lambda port: [hold(port, b"") for _ in range(2000)],
    "clients that vanish": lambda port: [vanish(port, path) for path in (b"/buffer/write", b"/ack") for _ in range(50)],
}


async def run_attack(name: str, port: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attackers = [asyncio.ensure_future(attacker) for attacker in ATTACKS[name](port)]
    await asyncio.sleep(0.5)
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    await asyncio.gather(*attackers)


@contextlib.contextmanager
def under_attack(name: str, port: int) -> Iterator[None]:
    """Attacks a server from another process while the block runs; the attack has begun when the block begins."""
    command = [sys.executable, "-m", "tests.slow_clients", name, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(run_attack(sys.argv[1], int(sys.argv[2])))
