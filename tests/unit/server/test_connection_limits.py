"""Who stays connected when there is no room, and for how long anybody is waited for."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from slime_plugins.rollout_buffer.server import connection_limits
from slime_plugins.rollout_buffer.server.connection_limits import Connection, ConnectionLimits


class FakeTransport(asyncio.Transport):
    """A client's connection, as far as the server sees it."""

    def __init__(self, peer: tuple[str, int]) -> None:
        super().__init__({"peername": peer, "sockname": ("127.0.0.1", 8889)})
        self.written = b""
        self.ended = ""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "cut off"

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Clients:
    """Clients of a server that keeps to limits; its application answers nothing by itself, unless one is given."""

    def __init__(self, most: int, application: Any = None) -> None:
        self.limits = ConnectionLimits(most)
        self._state = ServerState()
        self._config = uvicorn.Config(
            application or self._never, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False
        )
        self._port = 0

    async def _never(self, _scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.Event().wait()

    def connect(self, address: str = "10.0.0.1") -> Client:
        self._port += 1
        return Client(self.limits, self._config, self._state, (address, self._port))


class Client:
    def __init__(
        self, limits: ConnectionLimits, config: uvicorn.Config, state: ServerState, peer: tuple[str, int]
    ) -> None:
        self.transport = FakeTransport(peer)
        self.connection = Connection(limits, config=config, server_state=state, app_state={})
        self.connection.connection_made(self.transport)

    def asks(self, *, known: bool = False) -> Client:
        """Its head is here; ``known`` when it carries the token."""
        self.connection.begin_request()
        if known:
            self.connection.prove()
        return self

    def is_answered(self) -> Client:
        self.connection.end_request()
        return self

    @property
    def stays(self) -> bool:
        return not self.transport.ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the limits see."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


async def test_the_one_that_was_waited_for_longest_gives_way() -> None:
    clients = Clients(most=4)
    first, second, third, fourth = (clients.connect(f"10.0.0.{number}") for number in range(4))
    newest = clients.connect("10.0.1.1")
    assert [each.stays for each in (first, second, third, fourth, newest)] == [False, True, True, True, True]
    assert len(clients.limits) == 4


async def test_strangers_give_way_before_those_that_may_ask_and_nobody_is_cut_off_who_is_worked_for() -> None:
    clients = Clients(most=3)
    idle = clients.connect("10.0.0.1").asks(known=True).is_answered()
    working = clients.connect("10.0.0.2").asks()
    stranger = clients.connect("10.0.0.3")
    fourth = clients.connect("10.0.0.4").asks()
    assert (idle.stays, working.stays, stranger.stays) == (True, True, False)
    fifth = clients.connect("10.0.0.5").asks()
    assert (idle.stays, working.stays, fourth.stays, fifth.stays) == (False, True, True, True)
    refused = clients.connect("10.0.0.6")
    assert (working.stays, fourth.stays, fifth.stays, refused.stays) == (True, True, True, False)
    assert len(clients.limits) == 3


async def test_one_address_gets_three_quarters_and_only_its_own_give_way_for_it() -> None:
    clients = Clients(most=8)
    other = clients.connect("10.9.9.9")
    flood = [clients.connect("10.0.0.1") for _ in range(20)]
    assert other.stays
    assert [each.stays for each in flood] == [False] * 14 + [True] * 6
    assert len(clients.limits) == 7


async def test_the_first_half_of_an_ipv6_address_counts_as_one() -> None:
    clients = Clients(most=4)
    flood = [clients.connect(f"2001:db8:1:2:{number:x}::1") for number in range(10)]
    assert sum(each.stays for each in flood) == 3
    assert clients.connect("2001:db8:1:3::1").stays
    assert sum(each.stays for each in flood) == 3


async def test_a_head_an_idle_connection_and_a_reply_have_their_time(clock: list[float]) -> None:
    clients = Clients(most=10)
    silent, answered, working = clients.connect(), clients.connect().asks().is_answered(), clients.connect().asks()
    reads_nothing = clients.connect().asks()
    reads_nothing.connection.pause_writing()
    clock[0] += connection_limits.HEAD_LIMIT_S + 1
    clients.limits.close_idle()
    assert [each.stays for each in (silent, answered, working, reads_nothing)] == [False, True, True, True]
    clock[0] += connection_limits.IDLE_LIMIT_S
    clients.limits.close_idle()
    assert [each.stays for each in (answered, working, reads_nothing)] == [False, True, True]
    clock[0] += connection_limits.READ_LIMIT_S
    clients.limits.close_idle()
    assert [each.stays for each in (working, reads_nothing)] == [True, False]


async def test_a_head_that_comes_byte_by_byte_gains_no_time(clock: list[float]) -> None:
    client = Clients(most=10).connect()
    clock[0] += 14
    client.connection.data_received(b"G")
    for letter in b"ET / HT":
        clock[0] += 2
        client.connection.data_received(bytes([letter]))
    client.connection._limits.close_idle()
    clock[0] += 2
    client.connection._limits.close_idle()
    assert not client.stays


async def test_a_client_that_reads_slowly_has_its_time_anew_with_everything_it_reads(clock: list[float]) -> None:
    clients = Clients(most=10)
    slow = clients.connect().asks()
    for _ in range(5):
        slow.connection.pause_writing()
        clock[0] += connection_limits.READ_LIMIT_S - 1
        clients.limits.close_idle()
        slow.connection.resume_writing()
    assert slow.stays


async def test_a_head_without_end_is_cut_off() -> None:
    client = Clients(most=10).connect()
    client.connection.data_received(b"GET / HTTP/1.1\r\nx: ")
    for _ in range(20):
        client.connection.data_received(b"y" * 16_384)
    assert not client.stays


async def test_of_thousands_of_requests_in_one_go_a_few_are_parsed_at_a_time() -> None:
    answers: list[Any] = []
    done = asyncio.Event()

    async def application(scope: Any, _receive: Any, send: Any) -> None:
        answers.append(scope["raw_path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        if len(answers) == 3000:
            done.set()

    clients = Clients(most=10, application=application)
    client = clients.connect()
    bodies = b"POST /1 HTTP/1.1\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000
    client.connection.data_received(bodies + b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % at for at in range(2, 3000)))
    assert len(client.connection.pipeline) < 300
    client.connection.data_received(b"GET /3000 HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(60):
        await done.wait()
    assert answers == [b"/%d" % at for at in range(1, 3001)]
    assert client.transport.written.count(b"HTTP/1.1 200") == 3000
    assert client.stays


class BrokenParser:
    def feed_data(self, data: bytes) -> None:
        raise RuntimeError("a defect")


async def test_what_goes_wrong_on_a_connection_ends_that_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    clients = Clients(most=10)
    bad, good = clients.connect(), clients.connect()
    bad.connection.parser = BrokenParser()  # type: ignore[assignment]  # as if its parser had a defect
    with caplog.at_level(logging.ERROR):
        bad.connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert bad.transport.ended
    assert good.stays


async def test_a_connection_that_is_lost_gives_its_place_back_once() -> None:
    clients = Clients(most=2)
    for _ in range(5):
        client = clients.connect()
        client.connection.connection_lost(None)
        client.connection.connection_lost(None)
    assert len(clients.limits) == 0
    assert clients.limits.of(("10.0.0.1", 1)) is None


def test_there_are_no_more_connections_than_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connection_limits.affordable(2048) == 614  # and 154 more that may wait
    assert connection_limits.affordable(500) == 500
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limits.affordable(2048) == 2048


def test_the_soft_limit_of_files_is_raised_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    connection_limits.raise_file_limit()
    assert wanted == [(4096, 4096)]
