"""Reserves ports for an emulator among the workers of a host, by file locks."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.devices.file_locks import try_lock
from slime_plugins.rollout_buffer.errors import DeviceError

NO_ADB_SEARCH = {"ADB_EMU": "0", "ADB_LOCAL_TRANSPORT_MAX_PORT": "5554"}
"""Environment of an adb server that must not search for emulators from port 5555 on: each emulator is registered with
a server of its own. The second variable alone is not enough: some versions start the search before they read it."""

_TRIES = 200
_LAST_CONSOLE_PORT = 5682  # the emulator accepts even ports from 5554 to this one


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorPorts:
    """Ports of one emulator. ``release`` unlocks them."""

    console: int
    grpc: int
    adb_server: int
    _locks: ExitStack

    @property
    def serial(self) -> str:
        """The device's serial for adb."""
        return f"emulator-{self.console}"

    def release(self) -> None:
        """Unlocks the ports; a second call does nothing."""
        self._locks.close()


def hold_ports(console: int, grpc: int, adb_server: int, *, lowest_console: int | None = None) -> EmulatorPorts:
    """Reserves the first free ports from the given ones on: an even console port, and the next port for adb.

    After console port 5682 the search continues at ``lowest_console``.

    Raises:
        DeviceError: there are no free ports in range.
    """
    with ExitStack() as locks:
        first = console + console % 2
        lowest = first if lowest_console is None else lowest_console + lowest_console % 2
        consoles = [*range(first, _LAST_CONSOLE_PORT + 1, 2), *range(lowest, min(first, _LAST_CONSOLE_PORT + 1), 2)]
        return EmulatorPorts(
            console=_hold_first_free(locks, consoles, width=2),
            grpc=_hold_first_free(locks, range(grpc, grpc + _TRIES)),
            adb_server=_hold_first_free(locks, range(adb_server, adb_server + _TRIES)),
            _locks=locks.pop_all(),
        )


def free_console_ports(console: int) -> int:
    """Returns the number of emulators that would find free console ports from the given one on."""
    return sum(is_free(port) and is_free(port + 1) for port in range(console + console % 2, _LAST_CONSOLE_PORT + 1, 2))


def _hold_first_free(locks: ExitStack, candidates: Sequence[int], width: int = 1) -> int:
    """Locks the first candidate from which ``width`` ports in a row are free, and returns it."""
    for port in candidates:
        lock = _lock(port)
        if lock is None:
            continue
        if all(is_free(port + offset) for offset in range(width)):
            locks.callback(lock.close)
            return port
        lock.close()
    port_range = f"between {min(candidates)} and {max(candidates)}" if candidates else f"up to {_LAST_CONSOLE_PORT}"
    raise DeviceError(f"no free port {port_range}")


def _lock(port: int) -> IO[str] | None:
    """Returns the lock on the port, which ends with its file or process; None if another process holds it."""
    # Not tempfile.gettempdir(): each device worker has its own temporary folder.
    folder = Path(os.environ.get("ROLLOUT_BUFFER_PORT_LOCKS", f"/tmp/rollout_buffer_ports_{os.getuid()}"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return try_lock(folder / f"{port}.lock")


def is_free(port: int) -> bool:
    """Returns True if no process listens on the port, on IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here
                continue
            return False
    return True
