"""gunicorn's threaded worker, made for large bodies and for clients that send one request after the other.

Two things are different. A thread that has answered waits a moment for the next request on the same connection before
it gives the connection back: the way through the worker's poller and thread pool costs more than a small write. And a
large body is received straight into one buffer that its thread keeps, where the general way copies it several times
through memory that is new each time.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Mapping
from typing import Any

from gunicorn.http.body import Body, LengthReader
from gunicorn.http.errors import NoMoreData
from gunicorn.http.unreader import SocketUnreader
from gunicorn.workers.gthread import ThreadWorker

__all__ = ["Worker", "receive_body"]

LINGER_S = 0.005
"""How long a thread waits for the next request. Longer would keep threads from connections that do send."""
KEPT_BYTES = 2 * 1024 * 1024
"""Largest buffer that a thread keeps for its next request."""

_thread = threading.local()


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn brings no types
    """``gthread``, with threads that linger on their connection."""

    def handle(self, conn: Any) -> Any:
        """Serves requests of one connection until no further one comes at once."""
        while True:
            outcome = super().handle(conn)
            if outcome is not True or not self.alive or conn.is_http2 or not _is_readable(conn):
                return outcome


def _is_readable(conn: Any) -> bool:
    if conn.parser.unreader.buf.getvalue():
        return True
    readable, _, _ = select.select([conn.sock], [], [], LINGER_S)
    return bool(readable)


def receive_body(environ: Mapping[str, Any], size: int) -> tuple[bytearray, int] | None:
    """Returns a buffer whose first ``size`` bytes are the request's body, valid until this thread's next call.

    None when the request is not one of gunicorn's plain ones, or was read from already: read it the general way then.

    Raises:
        NoMoreData: the client went away in the middle.
    """
    body = environ.get("wsgi.input")
    if not isinstance(body, Body) or not isinstance(body.reader, LengthReader) or body.buf.tell():
        return None
    reader = body.reader
    if not isinstance(reader.unreader, SocketUnreader) or reader.length != size:
        return None
    buffer = _buffer_for(size)
    early = reader.unreader.take_buffered()
    have = min(len(early), size)
    buffer[:have] = early[:have]
    reader.unreader.unread(early[have:])
    try:
        with memoryview(buffer) as view:
            while have < size:
                got = reader.unreader.sock.recv_into(view[have:size])
                if got == 0:
                    raise NoMoreData
                have += got
    except BaseException:
        body.failed = True
        raise
    reader.length = 0
    return buffer, size


def _buffer_for(size: int) -> bytearray:
    kept: bytearray | None = getattr(_thread, "buffer", None)
    if kept is not None and len(kept) >= size:
        return kept
    buffer = bytearray(max(size, min(2 * size, KEPT_BYTES)))
    if len(buffer) <= KEPT_BYTES:
        _thread.buffer = buffer
    return buffer
