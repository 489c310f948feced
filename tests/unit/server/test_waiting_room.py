"""Sockets wait until their request is here, and are no connections until then."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from slime_plugins.rollout_buffer.server.waiting_room import ENOUGH_OF_A_BODY, WaitingRoom, has_sent_enough

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


class Door:
    """A waiting room and clients before it."""

    def __init__(self, most: int = 100, limit_s: float = 1000.0) -> None:
        self.admitted: list[socket.socket] = []
        self.room = WaitingRoom(most, limit_s, self.admitted.append)
        self.clients: list[socket.socket] = []

    def comes(self, says: bytes = b"") -> socket.socket:
        client, server = socket.socketpair()
        server.setblocking(False)
        client.settimeout(10)
        client.sendall(says)
        self.clients.append(client)
        self.room.enter(server)
        return client

    def close(self) -> None:
        self.room.close()
        for each in [*self.clients, *self.admitted]:
            each.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
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


def test_who_brings_a_request_is_let_in_and_nothing_of_it_is_lost(door: Door) -> None:
    door.comes(GET)
    (admitted,) = door.admitted
    assert admitted.recv(1000) == GET


def test_who_says_the_rest_later_is_let_in_then(door: Door) -> None:
    client = door.comes(GET[:10])
    door.room.look()
    assert (len(door.admitted), len(door.room)) == (0, 1)
    client.sendall(GET[10:])
    door.room.look()
    assert (len(door.admitted), len(door.room)) == (1, 0)


def test_the_one_that_came_first_leaves_a_room_that_is_full() -> None:
    door = Door(most=3)
    try:
        clients = [door.comes(b"GET") for _ in range(5)]
        assert [was_sent_away(client) for client in clients] == [True, True, False, False, False]
    finally:
        door.close()


def test_who_has_said_nothing_yet_does_not_leave_for_those_who_said_a_part() -> None:
    door = Door(most=4)
    try:
        silent = door.comes()
        halves = [door.comes(b"GET") for _ in range(50)]
        assert not was_sent_away(silent)
        silent.setblocking(True)
        silent.sendall(GET)
        door.room.look()
        assert len(door.admitted) == 1
        assert sum(was_sent_away(half) for half in halves) == 47
    finally:
        door.close()


def test_a_full_room_takes_more_once_the_first_has_had_its_time_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(most=2)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def more_are_taken() -> bool:
        return door.room.takes_more

    try:
        door.comes(b"GET")
        assert more_are_taken()
        door.comes(b"GET")
        assert not more_are_taken()
        now[0] += 1
        assert more_are_taken()
    finally:
        door.close()


def test_who_goes_or_takes_too_long_waits_no_more(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, slow = door.comes(), door.comes(b"GET")
    gone.close()
    door.room.look()
    assert len(door.room) == 1
    late = time.monotonic() + 1001
    monkeypatch.setattr(time, "monotonic", lambda: late)
    door.room.look()
    assert len(door.room) == 0
    assert was_sent_away(slow)


def test_all_are_let_in_once_there_is_room_again(door: Door) -> None:
    door.comes()
    door.comes(b"GET")
    door.room.look(admits_all=True)
    assert (len(door.admitted), len(door.room)) == (2, 0)
