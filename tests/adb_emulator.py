"""An emulator as the real ``adb`` sees one: a port on which a very small Android answers. For tests of adb servers.

Run as ``python -m tests.adb_emulator -avd NAME -port 5556 …``; it listens one port above its console's. ``getprop``
answers ``1``, ``pm`` a path, everything else is echoed.
"""

from __future__ import annotations

import itertools
import socketserver
import struct
import sys
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("<4sIIIII")
_VERSION, _MOST = 0x01000000, 256 * 1024
_BANNER = b"device::ro.product.name=sim;ro.product.model=sim;ro.product.device=sim;features=cmd"


class _Transport(socketserver.BaseRequestHandler):
    """One adb server's connection: as many commands as it likes."""

    def handle(self) -> None:
        while head := self._read(_HEAD.size):
            command, first, _, length, _, _ = _HEAD.unpack(head)
            payload = self._read(length)
            if command == b"CNXN":
                self._send(b"CNXN", _VERSION, _MOST, _BANNER)
            elif command == b"OPEN":
                said = _answer(payload.rstrip(b"\0").decode())
                self._send(b"OKAY", 1, first)
                self._send(b"WRTE", 1, first, said)
                self._send(b"CLSE", 1, first)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self.request.recv(size - len(data))):
            data += more
        return data if len(data) == size else b""

    def _send(self, command: bytes, first: int, second: int, payload: bytes = b"") -> None:
        check = struct.unpack("<I", command)[0] ^ 0xFFFFFFFF
        self.request.sendall(_HEAD.pack(command, first, second, len(payload), sum(payload), check) + payload)


def _answer(service: str) -> bytes:
    words = service.partition(":")[2]
    if words.startswith("getprop"):
        return b"1\n"
    return b"package:/system/framework\n" if words.startswith("pm ") else words.encode() + b"\n"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def main(words: Sequence[str]) -> None:
    """Serves until it is killed."""
    values: dict[str, Any] = dict(itertools.pairwise(words))
    with _Server(("127.0.0.1", int(values["-port"]) + 1), _Transport) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
