"""Sockets wait until their request is here, and are no connections until then."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from slime_plugins.rollout_buffer.server.pending_connections import (
    ENOUGH_OF_A_BODY,
    PendingConnections,
    has_sent_enough,
)

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "enough"),
    [
        (b"", False),
        (b"GET /health HTTP/1.1\r\nHost: loc", False),
        (GET, True),
        (GET * 3, True),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n1234", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n12345", True),
        (b"POST / HTTP/1.1\r\ncontent-length:5\r\n\r\n12345", True),
        (b"POST / HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n ", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 200000000\r\n\r\n" + b" " * ENOUGH_OF_A_BODY, True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n123", False),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", True),
        (b"POST / HTTP/1.1\r\nContent-Length: many\r\n\r\n", True),  # is refused, like everything that is no request
        (b"\x16\x03\x01\x02\r\n\r\n", True),
    ],
)
def test_a_request_is_here_with_its_body_or_enough_of_it(sent: bytes, enough: bool) -> None:
    assert has_sent_enough(sent) == enough


class Listener:
    """Pending connections and their clients."""

    def __init__(self, most: int = 100, limit_s: float = 1000.0) -> None:
        self.admitted: list[socket.socket] = []
        self.pending = PendingConnections(most, limit_s, self.admitted.append)
        self.clients: list[socket.socket] = []

    def comes(self, says: bytes = b"") -> socket.socket:
        client, server = socket.socketpair()
        server.setblocking(False)
        client.settimeout(10)
        client.sendall(says)
        self.clients.append(client)
        self.pending.add(server)
        return client

    def close(self) -> None:
        self.pending.close()
        for each in [*self.clients, *self.admitted]:
            each.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def was_sent_away(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # what it said was never read
        return True


def test_who_brings_a_request_is_let_in_and_nothing_of_it_is_lost(listener: Listener) -> None:
    listener.comes(GET)
    (admitted,) = listener.admitted
    assert admitted.recv(1000) == GET


def test_who_says_the_rest_later_is_let_in_then(listener: Listener) -> None:
    client = listener.comes(GET[:10])
    listener.pending.poll()
    assert (len(listener.admitted), len(listener.pending)) == (0, 1)
    client.sendall(GET[10:])
    listener.pending.poll()
    assert (len(listener.admitted), len(listener.pending)) == (1, 0)


def test_the_one_that_came_first_leaves_when_too_many_wait() -> None:
    listener = Listener(most=3)
    try:
        clients = [listener.comes(b"GET") for _ in range(5)]
        assert [was_sent_away(client) for client in clients] == [True, True, False, False, False]
    finally:
        listener.close()


def test_who_has_said_nothing_yet_does_not_leave_for_those_who_said_a_part() -> None:
    listener = Listener(most=4)
    try:
        silent = listener.comes()
        halves = [listener.comes(b"GET") for _ in range(50)]
        assert not was_sent_away(silent)
        silent.setblocking(True)
        silent.sendall(GET)
        listener.pending.poll()
        assert len(listener.admitted) == 1
        assert sum(was_sent_away(half) for half in halves) == 47
    finally:
        listener.close()


def test_when_full_it_takes_more_once_the_first_has_had_its_time_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(most=2)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def more_are_taken() -> bool:
        return listener.pending.takes_more

    try:
        listener.comes(b"GET")
        assert more_are_taken()
        listener.comes(b"GET")
        assert not more_are_taken()
        now[0] += 1
        assert more_are_taken()
    finally:
        listener.close()


def test_who_goes_or_takes_too_long_waits_no_more(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, slow = listener.comes(), listener.comes(b"GET")
    gone.close()
    listener.pending.poll()
    assert len(listener.pending) == 1
    late = time.monotonic() + 1001
    monkeypatch.setattr(time, "monotonic", lambda: late)
    listener.pending.poll()
    assert len(listener.pending) == 0
    assert was_sent_away(slow)


def test_all_are_let_in_once_there_is_room_again(listener: Listener) -> None:
    listener.comes()
    listener.comes(b"GET")
    listener.pending.poll(admits_all=True)
    assert (len(listener.admitted), len(listener.pending)) == (2, 0)
