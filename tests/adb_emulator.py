"""An emulator as the real ``adb`` sees one: a port on which a very small Android answers. For tests of adb servers.

Run as ``python -m tests.adb_emulator -avd NAME -port 5556 …``; it listens one port above its console's. ``getprop``
answers ``1``, ``pm`` a path, ``avd`` the name of its virtual device, everything else is echoed. Like the real one it
refuses a virtual device that another runs or whose disks lead out of its folder, and leaves a lock file behind.
``next_boots`` beside the virtual devices has a word for each of the next starts: ``exit`` ends at once, ``crash`` ends
at its first tap, ``wedge`` answers nothing any more from then on, ``well`` does none of it. ``starts`` has a line for
every start: the virtual device and the word.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socketserver
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<4sIIIII")
_VERSION, _MAX_PAYLOAD_BYTES = 0x01000000, 256 * 1024
_BANNER = b"device::ro.product.name=sim;ro.product.model=sim;ro.product.device=sim;features=cmd"


class _Phone:
    """Answers what adb asks of the emulator's Android."""

    def __init__(self, avd: str, fault: str) -> None:
        self._avd = avd
        self._fault = fault
        self._wedged = False

    def answer(self, service: str) -> bytes:
        words = service.partition(":")[2]
        if words.startswith("getprop"):
            return b"1\n"
        if words.startswith("pm "):
            return b"package:/system/framework\n"
        if words.startswith("input tap") and self._fault == "crash":
            os._exit(139)
        if words.startswith("input tap") and self._fault == "wedge":
            self._wedged = True
        if self._wedged:
            threading.Event().wait()
        known = {"avd": self._avd, "wm size": "Physical size: 540x1200"}
        return f"{known.get(words, words)}\n".encode()


class _Transport(socketserver.BaseRequestHandler):
    """One adb server's connection: as many commands as it likes."""

    server: _Server

    def handle(self) -> None:
        while head := self._read(_HEAD.size):
            command, first, _, length, _, _ = _HEAD.unpack(head)
            payload = self._read(length)
            if command == b"CNXN":
                self._send(b"CNXN", _VERSION, _MAX_PAYLOAD_BYTES, _BANNER)
            elif command == b"OPEN":
                answer = self.server.phone.answer(payload.rstrip(b"\0").decode())
                self._send(b"OKAY", 1, first)
                self._send(b"WRTE", 1, first, answer)
                self._send(b"CLSE", 1, first)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.request.recv(size - len(data))):
            data += more
        return data if len(data) == size else b""

    def _send(self, command: bytes, first: int, second: int, payload: bytes = b"") -> None:
        magic = struct.unpack("<I", command)[0] ^ 0xFFFFFFFF  # the protocol's name for the inverted command
        self.request.sendall(_HEAD.pack(command, first, second, len(payload), sum(payload), magic) + payload)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, phone: _Phone) -> None:
        super().__init__(("127.0.0.1", port), _Transport)
        self.phone = phone


def main(words: Sequence[str]) -> int:
    """Serves until it is killed; returns 1 when it refuses to start."""
    values: dict[str, Any] = dict(itertools.pairwise(words))
    home = Path(os.environ.get("ANDROID_AVD_HOME", ""))
    folder = home / f"{values['-avd']}.avd"
    fault = _next_boot(home)
    with (home / "starts").open("a") as starts:
        starts.write(f"{values['-avd']} {fault or 'well'}\n")
    problem = _problem(folder) or ("told to end" if fault == "exit" else "")
    if problem:
        sys.stderr.write(f"PANIC: {problem}\n")
        return 1
    if folder.is_dir():
        (folder / "hardware-qemu.ini.lock").write_text(str(os.getpid()))
        (folder / "multiinstance.lock").touch()
    with _Server(int(values["-port"]) + 1, _Phone(str(values["-avd"]), fault)) as server:
        server.serve_forever()
    return 0


def _next_boot(home: Path) -> str:
    """Takes the first word out of ``next_boots``; "" where there is none."""
    path = home / "next_boots"
    if not path.is_file():
        return ""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first, *rest = [*file.read().split(), ""]
        file.seek(0)
        file.truncate()
        file.write("\n".join(rest))
    return first


def _problem(folder: Path) -> str:
    """Returns what is wrong with the virtual device, or ""."""
    lock = folder / "hardware-qemu.ini.lock"
    if lock.is_file() and Path(f"/proc/{lock.read_text().strip()}").is_dir():
        return f"{folder} is run by another emulator"
    for disk in folder.glob("*.qcow2"):
        data = disk.read_bytes()[:2048]
        offset, length = struct.unpack(">QI", data[8:20])  # of the backing file's name, in a qcow2 header
        backing = os.path.normpath(folder / data[offset : offset + length].decode())
        if Path(backing).parent != folder or not Path(backing).is_file():
            return f"{disk.name} reads {backing}, which is not its own"
        if Path(backing).stat().st_size != int((folder / "disk.size").read_text()):
            return f"{backing} is not whole"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
