"""Listening sockets that a test holds for ``serve`` or ``gateway``, as systemd does (sd_listen_fds(3))."""

from __future__ import annotations

import socket
from collections.abc import Sequence


class HeldSockets:
    """Listens on ports of the loopback interface until ``close``, for whoever is started with ``launcher``."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", port), backlog=1024) for port in ports]
        self.descriptors = [one.fileno() for one in self._sockets]
        """The program must inherit these."""

    @property
    def launcher(self) -> list[str]:
        """A command that runs the one after it, in the same process."""
        count = len(self.descriptors)
        away = " ".join(f"{20 + at}<&{descriptor}" for at, descriptor in enumerate(self.descriptors))
        back = " ".join(f"{3 + at}<&{20 + at} {20 + at}<&-" for at in range(count))
        return ["bash", "-c", f'exec {away}; exec {back}; LISTEN_PID=$$ LISTEN_FDS={count} exec "$@"', "bash"]

    def close(self) -> None:
        for one in self._sockets:
            one.close()
