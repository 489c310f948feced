"""An upper bound for the buffer benchmark: a server that receives requests and sends canned replies.

It stores nothing: a write is answered once its body was received, a read gets the bytes of a file. No buffer in one
process can exceed its rates with the benchmark's client on the same machine.

    python benchmarks/canned_server.py --port 8901 --reads items.json
"""

from __future__ import annotations

import argparse
import re
import selectors
import socket
from pathlib import Path

WRITTEN = b'{"success":true,"message":"written"}'
NOTHING = b'{"success":false,"data":{"data":[],"meta_info":{}}}'
SIZE = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
BUFFER_BYTES = 2 * 2**20


class Connection:
    """A client's connection; every second read returns nothing, so that the client stops."""

    def __init__(self, sock: socket.socket, items: bytes) -> None:
        self._sock = sock
        self._items = items
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = 0
        self._end: int | None = None
        self._reads = 0

    def receive(self) -> bool:
        """Receives available bytes and answers a complete request; False if the client has gone."""
        with memoryview(self._buffer) as view:
            received = self._sock.recv_into(view[self._filled :])
        self._filled += received
        if self._end is None and (head := self._buffer.find(b"\r\n\r\n", 0, self._filled)) >= 0:
            size = SIZE.search(self._buffer, 0, head)
            self._end = head + 4 + (int(size[1]) if size else 0)
        if self._end is not None and self._filled >= self._end:
            self._answer(bytes(self._buffer[:64]).split(b" ", 2)[1])
            self._filled, self._end = 0, None
        return received > 0

    def _answer(self, path: bytes) -> None:
        if path != b"/get_rollout_data":
            self._send(WRITTEN)
            return
        self._reads += 1
        self._send(self._items if self._reads % 2 else NOTHING)

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._sock.setblocking(True)
        self._sock.sendall(head)
        self._sock.sendall(body)
        self._sock.setblocking(False)


def serve(listener: socket.socket, items: bytes) -> None:
    """Serves every connection until the process is stopped."""
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            try:
                if key.data is None:
                    sock, _address = listener.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setblocking(False)
                    selector.register(sock, selectors.EVENT_READ, Connection(sock, items))
                elif not key.data.receive():
                    raise ConnectionError("it has gone")
            except BlockingIOError:
                continue  # no longer ready
            except OSError:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8901)
    parser.add_argument("--reads", type=Path, required=True, help="what a read gets")
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", options.port), backlog=256)
    items = options.reads.read_bytes()
    serve(listener, items)


if __name__ == "__main__":
    main()
