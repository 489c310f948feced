"""How long a client may take, and how many may be connected at a time.

uvicorn reads the requests. Here each of its connections is in one of two states: the server works on its request, or
the server waits for its client: for a head, for a body, for reading a reply, for the next request. Who is waited for
has a deadline, and gives way when a new connection finds no room: first clients that have not shown that they may ask,
then the others, each time the one that has been waited for longest. Who is worked for is never cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections import Counter, deque
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_LIMIT_S = 15.0
"""How long the head of a request may take."""
IDLE_LIMIT_S = 30.0
"""How long a connection may stay without a request."""
READ_LIMIT_S = 120.0
"""How long a client may take to read what the server has for it to read at once."""
ADDRESS_SHARE = 0.75
"""What one address may have of a worker's connections."""
FILES_BESIDE = 256
"""Files that a worker opens beside its connections: the database in each thread, packs, logs."""
MAX_FILES = 65_536
WAITING_FOR_EACH = 4
"""For so many connections one more socket may wait to become one."""
PARSED_AT_ONCE = 4096
"""Of what is not a body: a client may send thousands of requests in one go, and others want to be served meanwhile."""
MAX_HEAD = 128 * 1024
"""What may be received before a head is whole; the application refuses smaller ones with a reply."""

logger = logging.getLogger(__name__)


class RequestState(Protocol):
    """What the application says of a request, to whoever holds its connection."""

    is_lost: bool
    is_known: bool
    """The client has shown that it may ask."""
    answered: int
    """Requests of this connection that were answered."""

    def begin_request(self) -> None:
        """A head is here: the server works on it."""

    def wait_for_body(self) -> None:
        """The server waits for the client; whoever reads the body has a time limit of its own."""

    def body_is_here(self) -> None:
        """The server works again."""

    def prove(self) -> None:
        """The client may ask: it gives way only after all that have not shown that."""

    def end_request(self) -> None:
        """The request is answered: the server waits for the next one."""

    def cut_off(self) -> None:
        """Ends the connection without waiting for anything."""


class Unlimited:
    """Stands for a connection that nobody limits."""

    is_lost = False
    is_known = True
    answered = 0

    def begin_request(self) -> None:
        """Does nothing."""

    wait_for_body = body_is_here = prove = end_request = cut_off = begin_request


class ConnectionLimits:
    """The connections of one worker."""

    def __init__(self, most: int) -> None:
        """``most`` connections are held at a time, ``ADDRESS_SHARE`` of them from one address."""
        self.most_waiting = max(8, most // WAITING_FOR_EACH)
        """So many more may wait to become connections."""
        self._most = most
        self._most_per_address = max(1, int(ADDRESS_SHARE * most))
        self._all: dict[tuple[str, int], Connection] = {}
        self._of_address: Counter[str] = Counter()
        self._strangers: dict[Connection, float] = {}
        self._known: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def are_reached(self) -> bool:
        """Tells whether somebody may have to give way for a new connection."""
        return len(self._all) >= self._most_per_address

    def of(self, client: tuple[str, int] | None) -> Connection | None:
        """Returns the connection with a client's address and port."""
        return None if client is None else self._all.get(client)

    def admit(self, connection: Connection) -> bool:
        """Takes a new connection in, at the cost of another when there is no room; False when nobody can give way."""
        address = connection.address
        if self._of_address[address] >= self._most_per_address and not self.make_room(address):
            return False
        if len(self._all) >= self._most and not self.make_room():
            return False
        self._all[connection.peer] = connection
        self._of_address[address] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Says that a connection is gone."""
        self.works(connection)
        if self._all.get(connection.peer) is connection:
            del self._all[connection.peer]
            self._of_address[connection.address] -= 1
            if not self._of_address[connection.address]:
                del self._of_address[connection.address]

    def waits(self, connection: Connection, limit_s: float) -> None:
        """Says that the server waits for a client, from now on and for so long at most."""
        self.works(connection)
        waiting = self._known if connection.is_known else self._strangers
        waiting[connection] = time.monotonic() + limit_s

    def works(self, connection: Connection) -> None:
        """Says that the server does not wait for a client."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def make_room(self, address: str | None = None) -> bool:
        """Cuts off whom the server waits for, of that address; False when it waits for nobody there."""
        for waiting in (self._strangers, self._known):
            for connection in waiting:
                if address is None or connection.address == address:
                    connection.cut_off()
                    return True
        return False

    def close_idle(self) -> None:
        """Cuts off whose time is up."""
        now = time.monotonic()
        for waiting in (self._strangers, self._known):
            for connection in [each for each, until in waiting.items() if until < now]:
                connection.cut_off()


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's that keeps to the limits. Nothing that happens on it leaves it."""

    def __init__(self, limits: ConnectionLimits, **given: Any) -> None:
        """``given`` is what uvicorn gives its protocols."""
        super().__init__(**given)
        self._limits = limits
        self.peer = ("", 0)
        self.address = ""
        self.is_known = False
        self.is_lost = False
        self.answered = 0
        self._in_request = False
        self._head_bytes = 0
        self._body_left = 0
        self._unparsed = b""
        self._unanswered: deque[RequestResponseCycle] = deque()

    # --- what the transport says -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Takes its place among the others, or is refused."""
        super().connection_made(transport)
        self.peer = tuple(transport.get_extra_info("peername") or ("", 0))[:2]
        self.address = _network(self.peer[0])
        if self._limits.admit(self):
            self._limits.waits(self, HEAD_LIMIT_S)
        else:
            self.is_lost = True
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses what came, as far as its requests can be answered soon. What goes wrong ends this connection alone."""
        if self._unparsed:
            self._unparsed += data  # what was under way when reading was paused
            return
        at = 0
        while at < len(data) and not self.is_lost:
            if self.pipeline:
                self._unparsed = data[at:]
                self.flow.pause_reading()
                return
            size = max(PARSED_AT_ONCE, self._body_left)
            self._parse(data[at : at + size])
            at += size

    def _parse(self, data: bytes) -> None:
        if not self._in_request:
            if self._head_bytes > MAX_HEAD:
                self.cut_off()
                return
            if not self._head_bytes:
                self._limits.waits(self, HEAD_LIMIT_S)
            self._head_bytes += len(data)
        try:
            super().data_received(data)
        except Exception:
            logger.exception("a connection is closed")
            self.cut_off()

    def on_headers_complete(self) -> None:
        """Remembers the request until it is answered; uvicorn knows the last one of a pipeline."""
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        self._body_left = int(length) if length.isdigit() else 0

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Goes on with the next request, after those of others."""
        super().on_response_complete()
        if self._unparsed and not self.is_lost:
            self.flow.pause_reading()
            if not self.pipeline:
                self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        data, self._unparsed = self._unparsed, b""
        self.flow.resume_reading()
        self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives its place back."""
        self._leave()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered: from now on it is waited for."""
        super().pause_writing()
        self._limits.waits(self, READ_LIMIT_S)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if self._in_request:
            self._limits.works(self)
        elif not self.is_lost:
            self._limits.waits(self, IDLE_LIMIT_S)

    def cut_off(self) -> None:
        """Ends the connection without waiting for anything."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        self.is_lost = True
        self._limits.remove(self)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    # --- what the application says -----------------------------------------------------------------------------------

    def begin_request(self) -> None:
        """A head is here: the server works on it."""
        self._in_request, self._head_bytes = True, 0
        self._limits.works(self)

    def wait_for_body(self) -> None:
        """The server waits for the client; whoever reads the body has a time limit of its own."""
        if not self.is_lost:
            self._limits.waits(self, float("inf"))

    def body_is_here(self) -> None:
        """The server works again."""
        self._limits.works(self)

    def prove(self) -> None:
        """The client may ask: it gives way only after all that have not shown that."""
        self.is_known = True

    def end_request(self) -> None:
        """The request is answered: the server waits for the next one, or for the last reply to be read."""
        self._in_request = False
        self.answered += 1
        if not self.is_lost:
            self._limits.waits(self, READ_LIMIT_S if self.flow.write_paused else IDLE_LIMIT_S + HEAD_LIMIT_S)


def affordable(most: int) -> int:
    """Returns how many of ``most`` connections this process has file descriptors for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    return max(16, min(most, (files - FILES_BESIDE) * WAITING_FOR_EACH // (WAITING_FOR_EACH + 1)))


def raise_file_limit() -> None:
    """Lets this process open as many files as it may be allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses what the kernel does not give
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _network(address: str) -> str:
    """Returns what counts as one address: of IPv6 the first half, which one customer has."""
    return ":".join(address.split(":")[:4]) if ":" in address else address
