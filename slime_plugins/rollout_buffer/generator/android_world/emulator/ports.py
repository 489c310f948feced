"""Ports for an emulator that nobody else has, or takes meanwhile: held by file locks among the workers of a host."""

from __future__ import annotations

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
"""In the environment of an adb server: it does not look for emulators, which begins at 5555; each has a server that is
told of it. The second alone is not enough: some versions start to look before they have read it."""

_TRIES = 200
_LAST_CONSOLE_PORT = 5682  # the emulator takes even ports from 5554 up to here


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorPorts:
    """One emulator's ports. ``release`` lets others have them."""

    console: int
    grpc: int
    adb_server: int
    _held: ExitStack

    @property
    def serial(self) -> str:
        """The device's name to adb."""
        return f"emulator-{self.console}"

    def release(self) -> None:
        """Gives the ports back; a second call does nothing."""
        self._held.close()


def hold_ports(console: int, grpc: int, adb_server: int, *, lowest_console: int | None = None) -> EmulatorPorts:
    """Returns the first free ports from the given ones on: an even console port with the next one for adb.

    Console ports end at 5682; beyond it the search goes on at ``lowest_console``.

    Raises:
        DeviceError: there are no free ports in reach.
    """
    held = ExitStack()
    try:
        first = console + console % 2
        lowest = first if lowest_console is None else lowest_console + lowest_console % 2
        consoles = [*range(first, _LAST_CONSOLE_PORT + 1, 2), *range(lowest, min(first, _LAST_CONSOLE_PORT + 1), 2)]
        found_console = _first_held(held, consoles, width=2)
        return EmulatorPorts(
            console=found_console,
            grpc=_first_held(held, range(grpc, grpc + _TRIES)),
            adb_server=_first_held(held, range(adb_server, adb_server + _TRIES)),
            _held=held,
        )
    except DeviceError:
        held.close()
        raise


def free_console_ports(console: int) -> int:
    """Returns how many emulators find a console port and the next one free, from the given port on; takes none."""
    return sum(is_free(port) and is_free(port + 1) for port in range(console + console % 2, _LAST_CONSOLE_PORT + 1, 2))


def _first_held(held: ExitStack, candidates: Sequence[int], width: int = 1) -> int:
    for port in candidates:
        lock = _lock(port)
        if lock is None:
            continue
        if all(is_free(port + offset) for offset in range(width)):
            held.callback(lock.close)
            return port
        lock.close()
    reach = f"between {min(candidates)} and {max(candidates)}" if candidates else "up to where emulators look"
    raise DeviceError(f"no free port {reach}")


def _lock(port: int) -> IO[str] | None:
    """The lock on the port, which lasts until the file is closed or the process is gone; None when another has it."""
    # Not tempfile.gettempdir(): each device worker has a temporary folder of its own.
    folder = Path(os.environ.get("ROLLOUT_BUFFER_PORT_LOCKS", f"/tmp/rollout_buffer_ports_{os.getuid()}"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return try_lock(folder / f"{port}.lock")


def is_free(port: int) -> bool:
    """True when nobody listens on it, on IPv4 and on IPv6."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (97, 99):  # no IPv6 here
                continue
            return False
    return True
