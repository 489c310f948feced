"""The lane of writes: one thread receives what all connections bring, another answers it together.

Items come in numbers, and most of what a small one cost was being handed from thread to thread and waiting alone for
the disk. Here the worker's own loop receives the bodies of plain ``POST /buffer/write`` requests, and whatever has
arrived while the last ones were kept is kept next, with one fsync. Anything else, and anything unusual, is passed on to
the worker's threads as if it had never been looked at: other routes, bodies in chunks or very large ones, heads that
gunicorn should judge.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import httptools
from gunicorn.util import http_date

__all__ = ["Arrived", "Keeper", "Passenger", "Reply", "WriteLane"]

FIRST_LINE = b"POST /buffer/write HTTP/1.1\r\n"
LARGEST_HEAD = 16 * 1024
LARGEST_BODY = 8 * 1024 * 1024
"""Larger ones go to a thread."""
LANE_BYTES = 64 * 1024 * 1024
"""What the buffers of all requests in the lane may take; what comes beyond goes to a thread."""
BUFFER_SIZES = (128 * 1024, 512 * 1024, 1536 * 1024, 3 * 1024 * 1024)
"""Buffers of these sizes are kept for the next request: memory that was used before costs nothing to find."""
KEPT_BYTES = 32 * 1024 * 1024
"""What the kept ones may take together, while no request uses them."""
SHORT_REPLY = 16 * 1024
"""Fits into a connection's buffer, unless its client does not read replies."""
MOST_TOGETHER = 64
MOST_BYTES_TOGETHER = 8 * 1024 * 1024
"""Clients that are answered send their next items while those of others are kept: all at once, each would wait for the
other."""
READS_IN_A_ROW = 16
IDLE_S = 30.0
"""How long a connection may stay without a request."""
STOPPING_IDLE_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that is here whole: the first ``size`` bytes of ``content`` are its body, valid until it is answered.

    ``environ`` is what WSGI says of its head, as far as the routes ask for it.
    """

    environ: dict[str, Any]
    content: bytearray
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered: a status line's end (``200 OK``) and JSON."""

    status: str
    content: bytes


class Keeper(Protocol):
    """Answers writes, together."""

    def __call__(self, arrived: Sequence[Arrived]) -> Sequence[Reply]:
        """Returns a reply for each; never raises."""


@dataclass(eq=False, slots=True)
class Passenger:
    """A connection in the lane, and the request that is arriving on it."""

    conn: Any
    buffer: bytearray = field(default_factory=bytearray)
    have: int = 0
    arrived: Arrived | None = None
    """The request's head was read; ``have`` grows until its body is whole."""
    last_seen: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    """Until when the request must be here; None while none is arriving."""
    in_work: bool = False
    paused: bool = False
    """Not watched: something came while the last request was in work."""
    closes: bool = False

    @property
    def end(self) -> int:
        """Where the arriving request ends in the buffer."""
        assert self.arrived is not None
        return self.arrived.start + self.arrived.size


class _UnusualRequestError(Exception):
    """The request is not for the lane."""


class Host(Protocol):
    """What the lane needs of its worker."""

    alive: bool
    nr_conns: int
    poller: selectors.BaseSelector

    def defer(self, callback: Callable[[], None]) -> None:
        """Has the loop call back soon; safe to call from any thread."""

    def in_thread(self, work: Callable[[], None]) -> None:
        """Has one of the worker's threads do something; safe to call from any thread."""

    def leave_lane(self, conn: Any, received: bytes) -> None:
        """Takes a connection over, with what was received on it and not answered."""


class WriteLane:
    """One lane of one worker. Its methods are called by the worker's loop; its own thread keeps and answers."""

    def __init__(self, host: Host, keeper: Keeper, *, grant_s: Callable[[int | None], float]) -> None:
        """``grant_s`` says how long a request may take to arrive whose size is so many bytes (None: not known yet)."""
        self._host = host
        self._keeper = keeper
        self._grant_s = grant_s
        self._passengers: set[Passenger] = set()
        self._ready: list[Passenger] = []
        self._to_keep: queue.SimpleQueue[list[Passenger] | None] = queue.SimpleQueue()
        self._buffers: dict[int, list[bytearray]] = {size: [] for size in BUFFER_SIZES}
        self._bytes = self._kept_bytes = 0
        self._swept_at = 0.0
        self._thread = threading.Thread(target=self._keep_until_closed, name="write lane", daemon=True)
        self._thread.start()

    @property
    def held_bytes(self) -> int:
        """What the buffers of its connections take."""
        return self._bytes

    @property
    def kept_bytes(self) -> int:
        """What the buffers take that no connection uses at the moment."""
        return self._kept_bytes

    # --- the loop's side ---------------------------------------------------------------------------------------------

    @staticmethod
    def wants(connection: socket.socket) -> bool:
        """Tells, without receiving anything, whether a plain write is arriving."""
        try:
            return connection.recv(len(FIRST_LINE), socket.MSG_PEEK | socket.MSG_DONTWAIT) == FIRST_LINE
        except OSError:
            return False

    def board(self, conn: Any) -> None:
        """Takes a connection on which a write is arriving."""
        passenger = Passenger(conn)
        self._passengers.add(passenger)
        conn.sock.setblocking(False)
        self._watch(passenger)
        self._receive(passenger)

    def close(self) -> None:
        """Ends the lane's thread, after it has kept what it was handed."""
        self._to_keep.put(None)
        self._thread.join()

    def send_off(self) -> None:
        """Hands what has arrived whole to the thread that keeps it; the loop calls this after each round."""
        if self._ready:
            self._to_keep.put(self._ready)
            self._ready = []

    def sweep(self) -> None:
        """Lets go of connections that are idle or too slow; looks once a second."""
        now = time.monotonic()
        if now - self._swept_at < 1.0:
            return
        self._swept_at = now
        for passenger in [each for each in self._passengers if not each.in_work]:
            idle_s = IDLE_S if self._host.alive else STOPPING_IDLE_S
            if passenger.deadline is not None and passenger.deadline < now:
                with contextlib.suppress(OSError):
                    passenger.conn.sock.shutdown(socket.SHUT_RD)  # who receives it next finds its end
                self._pass_on(passenger)
            elif passenger.deadline is None and now - passenger.last_seen > idle_s:
                self._drop(passenger)
            elif not passenger.have:
                self._give_back(passenger)

    def _receive(self, passenger: Passenger) -> None:
        """Receives what is there, and puts the request among the ready ones when it is whole."""
        if passenger.in_work:
            self._pause(passenger)
            return
        try:
            reads = 0
            while not self._is_whole(passenger) and reads < READS_IN_A_ROW:
                if not self._receive_some(passenger):
                    self._lost(passenger)
                    return
                reads += 1
            if self._is_whole(passenger):
                self._start_work(passenger)
        except BlockingIOError:
            return
        except _UnusualRequestError:
            self._pass_on(passenger)
        except OSError:
            self._drop(passenger)

    def _receive_some(self, passenger: Passenger) -> int:
        self._make_room(passenger, passenger.have + 1)
        with memoryview(passenger.buffer) as view:
            got = passenger.conn.sock.recv_into(view[passenger.have :])
        if got and passenger.have == 0:
            passenger.deadline = time.monotonic() + self._grant_s(None)
        passenger.have += got
        return int(got)

    def _is_whole(self, passenger: Passenger) -> bool:
        if passenger.arrived is None and passenger.have:
            self._read_head(passenger)
        return passenger.arrived is not None and passenger.have >= passenger.end

    def _read_head(self, passenger: Passenger) -> None:
        """Reads the head when it is whole, and makes room for the body."""
        first = passenger.buffer[: min(passenger.have, len(FIRST_LINE))]
        end = passenger.buffer.find(b"\r\n\r\n", 0, passenger.have)
        if not FIRST_LINE.startswith(first) or (end < 0 and passenger.have > LARGEST_HEAD):
            raise _UnusualRequestError
        if end < 0:
            return
        start = end + 4
        environ, size = _understood(bytes(passenger.buffer[:start]))
        self._make_room(passenger, start + size)
        passenger.arrived = Arrived(environ, passenger.buffer, start, size)
        passenger.closes = environ.get("HTTP_CONNECTION", "").lower() == "close"
        passenger.deadline = time.monotonic() + self._grant_s(size)

    def _start_work(self, passenger: Passenger) -> None:
        passenger.in_work, passenger.deadline = True, None
        self._ready.append(passenger)

    def _watch(self, passenger: Passenger) -> None:
        passenger.paused = False
        self._host.poller.register(passenger.conn.sock, selectors.EVENT_READ, lambda _socket: self._receive(passenger))

    def _pause(self, passenger: Passenger) -> None:
        """Stops watching a connection until its request is answered."""
        self._host.poller.unregister(passenger.conn.sock)
        passenger.paused = True
        if not passenger.in_work:  # it was answered just now
            self._resume(passenger)

    def _resume(self, passenger: Passenger) -> None:
        if passenger in self._passengers and passenger.paused:
            self._watch(passenger)
            self._receive(passenger)
            self.send_off()

    def _lost(self, passenger: Passenger) -> None:
        """The client has gone: in order between two requests, or in the middle of one."""
        if passenger.have:
            self._pass_on(passenger)
        else:
            self._drop(passenger)

    def _pass_on(self, passenger: Passenger) -> None:
        received = bytes(passenger.buffer[: passenger.have])
        self._let_go(passenger)
        self._host.leave_lane(passenger.conn, received)

    def _drop(self, passenger: Passenger) -> None:
        if passenger in self._passengers:
            self._let_go(passenger)
            self._host.nr_conns -= 1
            passenger.conn.close()

    def _let_go(self, passenger: Passenger) -> None:
        self._passengers.discard(passenger)
        with contextlib.suppress(KeyError, ValueError):
            self._host.poller.unregister(passenger.conn.sock)
        self._give_back(passenger)

    # --- the thread that keeps ---------------------------------------------------------------------------------------

    def _keep_until_closed(self) -> None:
        waiting: deque[Passenger] = deque()
        closed = False
        while waiting or not closed:
            while not closed and not (waiting and self._to_keep.empty()):
                more = self._to_keep.get()
                if more is None:
                    closed = True
                else:
                    waiting += more
            if waiting:
                self._keep(_next_together(waiting))

    def _keep(self, waiting: Sequence[Passenger]) -> None:
        try:
            replies = self._keeper([passenger.arrived for passenger in waiting if passenger.arrived is not None])
            for passenger, reply in zip(waiting, replies, strict=True):
                self._answer(passenger, reply)
        except Exception:
            logger.exception("writes could not be answered: their connections are closed, and clients try again")
            for passenger in waiting:
                if passenger.in_work:
                    self._host.defer(partial(self._drop, passenger))

    def _answer(self, passenger: Passenger, reply: Reply) -> None:
        closes = passenger.closes or not self._host.alive
        encoded = _encoded(reply, closes)
        if len(encoded) > SHORT_REPLY:
            self._host.in_thread(partial(self._send_long, passenger, encoded, closes))
            return
        beyond = self._begin_next(passenger)  # from here on the loop may receive the next request
        try:
            sent = passenger.conn.sock.send(encoded) == len(encoded)  # who does not read its replies is cut off
        except OSError:
            sent = False
        self._after_reply(passenger, closes or not sent, beyond)

    def _send_long(self, passenger: Passenger, encoded: bytes, closes: bool) -> None:
        """Sends what may not fit into the connection's buffer; one of the worker's threads waits for the client."""
        try:
            passenger.conn.sock.settimeout(IDLE_S)
            passenger.conn.sock.sendall(encoded)
            passenger.conn.sock.setblocking(False)
        except OSError:
            closes = True
        self._after_reply(passenger, closes, self._begin_next(passenger))

    def _begin_next(self, passenger: Passenger) -> int:
        """Makes room for the next request, and returns how much of it is there already."""
        beyond = passenger.have - passenger.end
        if beyond:
            passenger.buffer[:beyond] = passenger.buffer[passenger.end : passenger.have]
        passenger.have, passenger.arrived, passenger.last_seen = beyond, None, time.monotonic()
        passenger.in_work = False
        return beyond

    def _after_reply(self, passenger: Passenger, closes: bool, beyond: int) -> None:
        if closes:
            self._host.defer(partial(self._drop, passenger))
        elif passenger.paused or beyond:
            self._host.defer(partial(self._go_on, passenger))

    def _go_on(self, passenger: Passenger) -> None:
        if passenger.paused:
            self._resume(passenger)
        elif passenger in self._passengers:
            self._receive(passenger)
            self.send_off()

    # --- buffers -----------------------------------------------------------------------------------------------------

    def _lend(self, size: int) -> bytearray:
        kept = self._buffers.get(size)
        self._bytes += size
        if not kept:
            return bytearray(size)
        self._kept_bytes -= size
        return kept.pop()

    def _give_back(self, passenger: Passenger) -> None:
        """Takes an idle connection's buffer for others; it gets one when its next request comes.

        The buffer of a request that is in work is still read: nobody else gets that one.
        """
        buffer, passenger.buffer = passenger.buffer, bytearray()
        size = len(buffer)
        self._bytes -= size
        kept = self._buffers.get(size)
        if kept is not None and not passenger.in_work and self._kept_bytes + size <= KEPT_BYTES:
            kept.append(buffer)
            self._kept_bytes += size

    def _make_room(self, passenger: Passenger, size: int) -> None:
        """Gives a request a buffer that is large enough."""
        if size <= len(passenger.buffer):
            return
        fitting = next((each for each in BUFFER_SIZES if each >= size), size)
        if self._bytes + fitting > LANE_BYTES:
            raise _UnusualRequestError
        larger = self._lend(fitting)
        larger[: passenger.have] = memoryview(passenger.buffer)[: passenger.have]
        self._give_back(passenger)
        passenger.buffer = larger


def _next_together(waiting: deque[Passenger]) -> list[Passenger]:
    """Takes those off the queue that are kept next."""
    together = [waiting.popleft()]
    size = together[0].have
    while waiting and len(together) < MOST_TOGETHER and size + waiting[0].have <= MOST_BYTES_TOGETHER:
        size += waiting[0].have
        together.append(waiting.popleft())
    return together


class _Head:
    """What httptools tells of a head."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_whole = True


def _understood(content: bytes) -> tuple[dict[str, Any], int]:
    """Returns a head as WSGI has it, and the size of the body.

    Raises:
        _UnusualRequestError: gunicorn should judge it.
    """
    head = _Head()
    try:
        httptools.HttpRequestParser(head).feed_data(content)
    except httptools.HttpParserError as error:
        raise _UnusualRequestError from error
    sizes = [value for name, value in head.headers if name == b"content-length"]
    if not head.is_whole or any(name in UNUSUAL_HEADERS for name, _ in head.headers):
        raise _UnusualRequestError
    if len(sizes) != 1 or not sizes[0].isdigit() or int(sizes[0]) > LARGEST_BODY:
        raise _UnusualRequestError
    environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": "/buffer/write"}
    for name, value in head.headers:
        environ["HTTP_" + name.decode("latin-1").upper().replace("-", "_")] = value.decode("latin-1")
    return environ, int(sizes[0])


UNUSUAL_HEADERS = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding"})


def _encoded(reply: Reply, closes: bool) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status}\r\nServer: gunicorn\r\nDate: {http_date()}\r\n"
        f"Connection: {'close' if closes else 'keep-alive'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(reply.content)}\r\n\r\n"
    )
    return head.encode("latin-1") + reply.content
