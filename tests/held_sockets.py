"""Listening sockets that a test holds for ``serve`` or ``gateway``, as systemd does (sd_listen_fds(3))."""

from __future__ import annotations

import socket
from collections.abc import Sequence


class HeldSockets:
    """Listens on ports of the loopback interface until ``close``, for whoever is started with ``launcher``."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._sockets = [socket.create_server(("127.0.0.1", port), backlog=1024) for port in ports]
        self.descriptors = [listener.fileno() for listener in self._sockets]
        """The program must inherit these."""

    @property
    def launcher(self) -> list[str]:
        """A command that runs the command after it in its own process, with the sockets where systemd puts them."""
        count = len(self.descriptors)
        # systemd's descriptors begin at 3. One of ours may be there already, so all go through numbers from 20 on.
        copy_aside = " ".join(f"{20 + at}<&{descriptor}" for at, descriptor in enumerate(self.descriptors))
        move_to_place = " ".join(f"{3 + at}<&{20 + at} {20 + at}<&-" for at in range(count))
        script = f'exec {copy_aside}; exec {move_to_place}; LISTEN_PID=$$ LISTEN_FDS={count} exec "$@"'
        return ["bash", "-c", script, "bash"]

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()
