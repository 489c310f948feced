"""gunicorn's threaded worker, made for large bodies and for clients that send one request after the other.

Two things are different. A thread that has answered waits for the next request on the same connection before it gives
the connection back, a while when there is a thread for every connection and a moment when there is not: the way through
the worker's poller and thread pool costs more than a small write. And bytes are not copied: a body is received straight
into one buffer that its thread keeps, and a long reply is sent from the pieces it consists of. The general way copies
both several times, through memory that is new each time.

Three things are added. New connections go to the worker that has the fewest: each has one interpreter, and whoever woke
first would take them all. Plain writes are received by the worker's own loop and kept together (``write_lane.py``),
where the application has a keeper for them. And there is a clock: a client that sends its request too slowly would keep
a thread for as long as it likes; here its connection is cut, so that slow senders cannot starve the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import select
import selectors
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from gunicorn import http
from gunicorn.glogging import Logger as GunicornLogger
from gunicorn.http.body import Body, LengthReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.unreader import SocketUnreader
from gunicorn.workers.gthread import TConn, ThreadWorker

from slime_plugins.rollout_buffer.logs import LogFormat, formatter, log_format, set_up_logging
from slime_plugins.rollout_buffer.write_lane import WriteLane

__all__ = [
    "KEEPER",
    "RECEIVE_ERRORS",
    "Logger",
    "Part",
    "Shares",
    "Worker",
    "grant_time",
    "limit_patience",
    "receive_body",
    "send_pieces",
    "stop_clock",
]

Part = Sequence[bytes | memoryview]
"""A part of a long reply, in the order of the pieces it consists of."""

LINGER_S = 0.005
"""How long a thread waits for the next request while other connections need threads."""
PATIENT_LINGER_S = 1.0
"""How long it waits while there is a thread for every connection."""
LINGER_STEP_S = 0.05
"""How often it looks whether that is still so."""
KEPT_BYTES = 2 * 1024 * 1024
"""Largest buffer that a thread keeps for its next request."""

HEAD_START_S = 0.001
"""What a worker with more connections leaves to the others, which were woken for the same one. If they are stuck or
gone, it takes the connection then."""
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
READ_PATIENCE_S = 120.0
"""How long a client may read nothing of a reply that is sent to it; it would keep a thread for as long as it likes."""
MOST_PIECES_AT_ONCE = 512
"""Linux takes 1024 in one call."""
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


class Shares:
    """How many connections each worker has, in memory that they all see: made before they are forked."""

    _ENTRY = struct.Struct("=qq")
    _ENTRIES = 256

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._ENTRIES * self._ENTRY.size)

    def note(self, worker: int, connections: int, pid: int) -> None:
        """Says how many connections a worker has; ``worker`` is gunicorn's number of it."""
        self._ENTRY.pack_into(self._memory, worker % self._ENTRIES * self._ENTRY.size, pid, connections)

    def is_ahead(self, connections: int) -> bool:
        """Tells whether another worker has fewer connections."""
        own = os.getpid()
        return any(
            have < connections and pid not in (0, own) and _lives(pid)
            for pid, have in self._ENTRY.iter_unpack(self._memory)
        )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


_shares = Shares()


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
        self._shares = _shares
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
        if self._shares.is_ahead(self.nr_conns):
            time.sleep(HEAD_START_S)
        try:
            client, address = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise
            return
        self.nr_conns += 1
        self._shares.note(self.age, self.nr_conns, self.pid)
        limit_patience(client)
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
        self._shares.note(self.age, self.nr_conns, self.pid)
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

    def handle_request(self, req: Any, conn: Any) -> Any:
        """Serves one request; a client that does not read its reply counts as gone."""
        try:
            return super().handle_request(req, conn)
        except BlockingIOError as error:
            raise BrokenPipeError(errno.EPIPE, "the client does not read its reply") from error

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


def send_pieces(environ: Mapping[str, Any], parts: Iterable[Part]) -> Iterator[bytes]:
    """Is the body of a reply in parts: sends each from where its pieces lie, as one chunk of HTTP/1.1.

    Where the connection is not a plain one, each part is joined and left to the general way.

    Raises:
        BrokenPipeError: the client has gone, or has not read anything for ``READ_PATIENCE_S``.
    """
    connection = environ.get("gunicorn.socket")
    if type(connection) is not socket.socket or environ.get("SERVER_PROTOCOL") != "HTTP/1.1":
        yield from map(b"".join, parts)
        return
    coming = iter(parts)
    first = next(coming, ())  # what is wrong with the first part is still answered as an error
    yield b""  # has gunicorn send the head; it makes no chunk of it, which would be the last
    for part in chain([first], coming):
        if size := sum(map(len, part)):
            _send_all(connection, [b"%X\r\n" % size, *part, b"\r\n"])


def _send_all(connection: socket.socket, pieces: Part) -> None:
    waiting = deque(memoryview(piece) for piece in pieces if len(piece))
    while waiting:
        sent = _send_some(connection, list(islice(waiting, MOST_PIECES_AT_ONCE)))
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.popleft())
        if sent:
            waiting[0] = waiting[0][sent:]


def _send_some(connection: socket.socket, pieces: Part) -> int:
    """Sends what the connection takes, waiting for a client that reads; a slow one makes room only now and then."""
    unread = _unread_bytes(connection)
    while True:
        try:
            return connection.sendmsg(pieces)
        except BlockingIOError as error:
            before, unread = unread, _unread_bytes(connection)
            if unread >= before:
                raise BrokenPipeError(errno.EPIPE, "the client does not read its reply") from error


def _unread_bytes(connection: socket.socket) -> int:
    """How much was sent on a connection that has not reached the other side's system."""
    (count,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def limit_patience(connection: socket.socket) -> None:
    """Has sending on a connection fail with ``BlockingIOError`` once nothing could be sent for a while."""
    seconds, parts_of_one = divmod(READ_PATIENCE_S, 1)
    timeval = struct.pack("ll", int(seconds), int(1_000_000 * parts_of_one))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
