"""The sockets that ``serve`` and ``gateway`` listen on: their own, or those of the process that started them.

Sockets are handed over as in systemd's socket activation (sd_listen_fds(3)). They outlive the process: while it is
started again, connections wait instead of being refused.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.http_serving import listen, socket_addresses

FIRST_DESCRIPTOR = 3
RETRY_S = 0.1

logger = logging.getLogger(__name__)


def listening_sockets(addresses: Sequence[tuple[str, int]], *, timeout_s: float) -> list[list[socket.socket]]:
    """Returns, for each host and port, the sockets that listen there: those this process was started with, or new ones.

    Waits up to ``timeout_s`` for a port that another process has.

    Raises:
        ConfigError: a port is taken, or the inherited sockets listen elsewhere.
    """
    if inherited := _inherited_sockets():
        return _by_address(inherited, addresses)
    deadline = time.monotonic() + timeout_s
    listening: list[list[socket.socket]] = []
    try:
        for host, port in addresses:
            listening.append(_listen(host, port, deadline))
    except ConfigError:
        for one in (one for sockets in listening for one in sockets):
            one.close()
        raise
    return listening


def _inherited_sockets() -> list[socket.socket]:
    """Returns the sockets named in the environment; removes their variables, which a child would take for its own."""
    count, pid, _ = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"))
    if count and pid != str(os.getpid()):
        logger.warning(
            "LISTEN_FDS is ignored: LISTEN_PID is %s, and this is process %d. Start rollout-buffer itself; a script "
            "that starts it must end with `exec rollout-buffer`",
            pid or "not set",
            os.getpid(),
        )
        return []
    try:
        descriptors = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count or 0))
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]
    except (ValueError, OSError) as error:
        raise ConfigError(f"LISTEN_FDS={count} is not the number of sockets from descriptor 3 on: {error}") from error


def _by_address(inherited: Sequence[socket.socket], addresses: Sequence[tuple[str, int]]) -> list[list[socket.socket]]:
    by_address = [[one for one in inherited if _listens_at(one, host, port)] for host, port in addresses]
    if all(by_address) and sum(map(len, by_address)) == len(inherited):
        return by_address
    names = [one.getsockname() for one in inherited]
    given = ", ".join(name if isinstance(name, str) else f"{name[0]}:{name[1]}" for name in names)
    for one in inherited:
        one.close()
    wanted = ", ".join(f"{host}:{port}" for host, port in addresses)
    raise ConfigError(
        f"the sockets handed over in LISTEN_FDS are at {given}, and the options ask for {wanted}: give the same "
        "addresses as ListenStream= of the .socket unit and as --host, --port and --gateway-port"
    )


def _listens_at(one: socket.socket, host: str, port: int) -> bool:
    expected = [address[:2] for family, address in socket_addresses(host, port) if family == one.family]
    return one.getsockname()[:2] in expected and bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listen(host: str, port: int, deadline: float) -> list[socket.socket]:
    while True:
        try:
            return listen(host, port)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)
