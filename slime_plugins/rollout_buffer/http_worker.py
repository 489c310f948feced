"""gunicorn's threaded worker, made for large bodies and for clients that send one request after the other.

Two things are different. A thread that has answered waits for the next request on the same connection before it gives
the connection back, a while when there is a thread for every connection and a moment when there is not: the way through
the worker's poller and thread pool costs more than a small write. And a body is received straight into one buffer that
its thread keeps, where the general way copies it several times through memory that is new each time.

Two things are added. Plain writes are received by the worker's own loop and kept together (``write_lane.py``), where
the application has a keeper for them. And there is a clock: a client that sends its request too slowly would keep a
thread for as long as it likes; here its connection is cut, so that slow senders cannot starve the others.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gunicorn import http
from gunicorn.glogging import Logger as GunicornLogger
from gunicorn.http.body import Body, LengthReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.unreader import SocketUnreader
from gunicorn.workers.gthread import TConn, ThreadWorker

from slime_plugins.rollout_buffer.logs import LogFormat, formatter, log_format, set_up_logging
from slime_plugins.rollout_buffer.write_lane import WriteLane

__all__ = ["KEEPER", "RECEIVE_ERRORS", "Logger", "Worker", "grant_time", "receive_body", "stop_clock"]

LINGER_S = 0.005
"""How long a thread waits for the next request while other connections need threads."""
PATIENT_LINGER_S = 1.0
"""How long it waits while there is a thread for every connection."""
LINGER_STEP_S = 0.05
"""How often it looks whether that is still so."""
KEPT_BYTES = 2 * 1024 * 1024
"""Largest buffer that a thread keeps for its next request."""

GC_THRESHOLDS = (20_000, 20, 50)
"""Parsed items are many objects and no cycles: looking through them for cycles took a twentieth of a write's time."""
KEEPER = "rollout_buffer_keeper"
"""The application's extension that answers the writes of the lane; without one there is no lane."""

RECEIVE_ERRORS = (OSError, ParseException)
"""What reading a body raises when it does not come as it should."""
PATIENCE_S = 15.0
"""How long the head of a request may take, and a body beyond what its size takes."""
SLOWEST_BYTES_PER_S = 100_000
"""How fast a body must come at least."""
UNKNOWN_SIZE = 3_000_000
"""What a body in chunks is taken to be, for its time."""

_thread = threading.local()


class _Clock:
    """Stops receiving from connections whose time is up. What was received whole is still answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[socket.socket, float] = {}

    def start(self, connection: socket.socket, seconds: float) -> None:
        with self._lock:
            self._until[connection] = time.monotonic() + seconds

    def stop(self, connection: socket.socket) -> None:
        with self._lock:
            self._until.pop(connection, None)

    def run(self) -> None:
        while True:
            time.sleep(1.0)
            with self._lock:
                now = time.monotonic()
                late = [connection for connection, until in self._until.items() if until < now]
                for connection in late:
                    del self._until[connection]
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)


_clock = _Clock()


def _granted_s(size: int | None) -> float:
    """How long a request may take to arrive whose body has so many bytes; None: its head."""
    return PATIENCE_S if size is None else PATIENCE_S + size / SLOWEST_BYTES_PER_S


def grant_time(environ: Mapping[str, Any], size: int | None) -> None:
    """Gives the body of a request the time that ``size`` bytes may take; None when nobody said how many."""
    connection = environ.get("gunicorn.socket")
    if connection is not None:
        _clock.start(connection, _granted_s(UNKNOWN_SIZE if size is None else size))


def stop_clock(environ: Mapping[str, Any]) -> None:
    """Says that the request is here, and may now be worked on for as long as that takes."""
    connection = environ.get("gunicorn.socket")
    if connection is not None:
        _clock.stop(connection)


class Logger(GunicornLogger):  # type: ignore[misc]  # gunicorn brings no types
    """gunicorn's own logger; where lines are to be JSON, its lines and the application's are."""

    def setup(self, cfg: Any) -> None:
        """Sets the loggers up as gunicorn does, then gives them the wanted format."""
        super().setup(cfg)
        if log_format() is LogFormat.JSON:
            set_up_logging(LogFormat.JSON)
            for handler in self.error_log.handlers:
                handler.setFormatter(formatter(LogFormat.JSON))


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn brings no types
    """``gthread``, with a lane for writes, threads that linger on their connection, and a clock for slow senders."""

    def init_process(self) -> None:
        """Starts the clock of this process, then serves."""
        gc.freeze()  # what was loaded stays
        gc.set_threshold(*GC_THRESHOLDS)
        threading.Thread(target=_clock.run, name="slow senders", daemon=True).start()
        self._lane: WriteLane | None = None
        super().init_process()

    def run(self) -> None:
        """Opens the lane, where the application has a keeper for it, and serves."""
        keeper = getattr(self.wsgi, "extensions", {}).get(KEEPER)
        if keeper is not None and not self.cfg.is_ssl:
            self._lane = WriteLane(self, keeper, grant_s=_granted_s)
        super().run()
        if self._lane is not None:
            self._lane.close()

    # --- the lane ----------------------------------------------------------------------------------------------------

    def accept(self, listener: Any) -> None:
        """Accepts a connection, and waits in the loop for what it brings."""
        if self._lane is None:
            super().accept(listener)
            return
        try:
            client, address = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise
            return
        self.nr_conns += 1
        conn = TConn(self.cfg, client, address, listener.getsockname())
        conn.set_timeout()
        self.pending_conns.append(conn)
        self.poller.register(client, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def on_pending_socket_readable(self, conn: Any, client: Any) -> None:
        """Takes the first request of a connection to the lane, or to a thread."""
        if self._boards(conn, client, self.pending_conns):
            return
        super().on_pending_socket_readable(conn, client)

    def on_client_socket_readable(self, conn: Any, client: Any) -> None:
        """Takes a further request of a connection to the lane, or to a thread."""
        if self._boards(conn, client, self.keepalived_conns):
            return
        super().on_client_socket_readable(conn, client)

    def _boards(self, conn: Any, client: Any, waiting: deque[Any]) -> bool:
        if self._lane is None or not self._lane.wants(client):
            return False
        self.poller.unregister(client)
        waiting.remove(conn)
        self._lane.board(conn)
        return True

    def leave_lane(self, conn: Any, received: bytes) -> None:
        """Has a thread go on with a connection whose request is not for the lane."""
        conn.sock.setblocking(True)
        if conn.parser is None:
            conn.parser = http.get_parser(self.cfg, conn.sock, conn.client)
        conn.initialized = True
        conn.parser.unreader.unread(received)
        self.enqueue_req(conn)

    def in_thread(self, work: Callable[[], None]) -> None:
        """Has one of the worker's threads do something."""
        self.tpool.submit(work)

    def defer(self, callback: Callable[[], None]) -> None:
        """Has the loop call back soon."""
        self.method_queue.defer(callback)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """One round of the loop; what has arrived whole by then is kept together."""
        super().wait_for_and_dispatch_events(timeout)
        if self._lane is not None:
            self._lane.send_off()
            self._lane.sweep()

    # --- threads -----------------------------------------------------------------------------------------------------

    def handle(self, conn: Any) -> Any:
        """Serves requests of one connection until no further one comes at once."""
        while True:
            _clock.start(conn.sock, PATIENCE_S)
            try:
                outcome = super().handle(conn)
            finally:
                _clock.stop(conn.sock)
            if outcome is not True or not self.alive or conn.is_http2 or not self._next_comes(conn):
                return outcome

    def _next_comes(self, conn: Any) -> bool:
        """Waits for the next request on a connection; False when its thread is better used elsewhere."""
        if conn.parser.unreader.buf.getvalue():
            return True
        readable = select.poll()
        readable.register(conn.sock, select.POLLIN)
        give_up_at = time.monotonic() + PATIENT_LINGER_S
        while self.alive and time.monotonic() < give_up_at:
            crowded = self.nr_conns > self.cfg.threads
            if readable.poll(1000 * (LINGER_S if crowded else LINGER_STEP_S)):
                return self._lane is None or not self._lane.wants(conn.sock)
            if crowded:
                return False
        return False


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
