"""The lane of writes: whatever way bytes arrive, each request is answered once, in order, or passed on untouched."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer import write_lane
from slime_plugins.rollout_buffer.write_lane import Arrived, Reply, WriteLane
from tests.example_counts import examples


@dataclass(eq=False)
class Connection:
    """What gunicorn knows of a connection, as far as the lane asks."""

    sock: socket.socket
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.sock.close()


class Loop:
    """A worker's loop that the test turns by hand."""

    def __init__(self) -> None:
        self.alive = True
        self.nr_conns = 0
        self.poller: selectors.BaseSelector = selectors.DefaultSelector()
        self.left: list[tuple[Connection, bytes]] = []
        self._deferred: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def defer(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._deferred.append(callback)

    def in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def leave_lane(self, conn: Connection, received: bytes) -> None:
        self.left.append((conn, received))

    def turn(self, lane: WriteLane) -> None:
        for key, _ in self.poller.select(0.005) if self.poller.get_map() else ():
            key.data(key.fileobj)
        with self._lock:
            deferred, self._deferred = self._deferred, []
        for callback in deferred:
            callback()
        lane.send_off()
        lane.sweep()

    def turn_until(self, lane: WriteLane, done: Callable[[], object], patience_s: float = 40.0) -> None:
        deadline = time.monotonic() + patience_s
        while not done():
            assert time.monotonic() < deadline, "it never came"
            self.turn(lane)


class EchoingKeeper:
    """Answers each write with its own body; ``gate`` holds it back."""

    def __init__(self) -> None:
        self.together: list[int] = []
        self.environs: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, arrived: Sequence[Arrived]) -> Sequence[Reply]:
        self.gate.wait(10)
        self.together.append(len(arrived))
        self.environs += [request.environ for request in arrived]
        bodies = [bytes(each.content[each.start : each.start + each.size]) for each in arrived]
        self.bodies += bodies
        if b"broken" in bodies:
            raise RuntimeError("the keeper has a defect")
        return [Reply("200 OK", body) for body in bodies]


@dataclass
class Track:
    """A lane with its loop and keeper, and clients to it."""

    loop: Loop
    keeper: EchoingKeeper
    lane: WriteLane
    sockets: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        self.keeper.gate.set()
        self.lane.close()
        self.loop.poller.close()
        for each in self.sockets:
            each.close()

    def client(self) -> tuple[socket.socket, Connection]:
        ours, theirs = socket.socketpair()
        ours.settimeout(40)
        self.sockets += (ours, theirs)
        self.loop.nr_conns += 1
        return ours, Connection(theirs)

    def turn_until(self, done: Callable[[], object]) -> None:
        self.loop.turn_until(self.lane, done)

    def replies(self, client: socket.socket, count: int) -> list[bytes]:
        """Turns the loop until so many replies are there, and returns their bodies."""
        client.setblocking(False)
        held = bytearray()
        bodies: list[bytes] = []

        def read() -> bool:
            with contextlib.suppress(BlockingIOError):
                held.extend(client.recv(1 << 20))
            bodies[:] = _bodies(bytes(held))
            return len(bodies) >= count

        self.turn_until(read)
        return bodies


def _bodies(received: bytes) -> list[bytes]:
    bodies = []
    while b"\r\n\r\n" in received:
        head, rest = received.split(b"\r\n\r\n", 1)
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        if len(rest) < size:
            break
        bodies.append(rest[:size])
        received = rest[size:]
    return bodies


def lay_track(grant_s: float = 5.0) -> Track:
    loop, keeper = Loop(), EchoingKeeper()
    return Track(loop, keeper, WriteLane(loop, keeper, grant_s=lambda size: grant_s))


@pytest.fixture
def track() -> Iterator[Track]:
    track = lay_track()
    yield track
    track.close()


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /buffer/write HTTP/1.1", "Host: here", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_a_write_is_answered_and_its_connection_serves_the_next(track: Track) -> None:
    client, conn = track.client()
    for body in (b'{"one": 1}', b"x" * 300_000, b""):
        client.setblocking(True)
        sender = threading.Thread(target=client.sendall, args=(request(body, "Authorization: Bearer t"),))
        sender.start()
        if not track.keeper.together:
            track.turn_until(lambda: track.lane.wants(conn.sock))
            track.lane.board(conn)
        track.turn_until(lambda: not sender.is_alive())  # noqa: B023 - it is called in this round only
        assert track.replies(client, 1) == [body]

    assert track.keeper.environs[0]["HTTP_AUTHORIZATION"] == "Bearer t"
    assert track.loop.left == []


def test_what_arrives_while_others_are_kept_is_kept_together(track: Track) -> None:
    clients = [track.client() for _ in range(9)]
    track.keeper.gate.clear()
    for number, (client, conn) in enumerate(clients):
        client.sendall(request(json.dumps({"number": number}).encode()))
        track.lane.board(conn)
        track.lane.send_off()
    track.keeper.gate.set()

    answers = [track.replies(client, 1)[0] for client, _ in clients]

    assert [json.loads(answer)["number"] for answer in answers] == list(range(9))
    assert sum(track.keeper.together) == 9
    assert len(track.keeper.together) <= 3


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=6), st.data())
@examples(60)
def test_requests_sent_one_behind_the_other_are_answered_in_order_however_they_are_cut(
    bodies: list[bytes], data: st.DataObject
) -> None:
    track = lay_track()
    bodies = [body for body in bodies if body != b"broken"] or [b"whole"]
    stream = b"".join(request(body) for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    client, conn = track.client()

    client.sendall(stream[: len(write_lane.FIRST_LINE)])
    track.lane.board(conn)
    at = len(write_lane.FIRST_LINE)
    for cut in [*[cut for cut in cuts if cut > at], len(stream)]:
        client.sendall(stream[at:cut])
        at = cut
        track.loop.turn(track.lane)

    assert track.replies(client, len(bodies)) == bodies
    client.close()
    track.turn_until(lambda: track.loop.nr_conns == 0)
    track.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /jobs HTTP/1.1\r\nHost: here\r\n\r\n",
        b"POST /buffer/write/ HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n",
        b"POST /buffer/write HTTP/1.0\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_other_requests_are_not_for_the_lane(track: Track, sent: bytes) -> None:
    client, conn = track.client()
    client.sendall(sent)

    assert not track.lane.wants(conn.sock)
    assert conn.sock.recv(1000) == sent


@pytest.mark.parametrize(
    "sent",
    [
        request(b"{}", "Transfer-Encoding: chunked"),
        request(b"{}", "Expect: 100-continue"),
        request(b"{}", "Upgrade: h2c"),
        request(b"{}", "Content-Encoding: gzip"),
        request(b"{}", "Content-Length: 7"),
        request(b"{}", "no colon here"),
        b"POST /buffer/write HTTP/1.1\r\nHost: here\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /buffer/write HTTP/1.1\r\nX: " + b"a" * 17_000,
    ],
)
def test_an_unusual_write_is_passed_on_with_every_byte_that_came(track: Track, sent: bytes) -> None:
    client, conn = track.client()
    client.sendall(sent)
    track.lane.board(conn)
    track.turn_until(lambda: track.loop.left)

    ((left, received),) = track.loop.left
    assert left is conn
    assert received == sent
    assert track.keeper.together == []


def test_another_route_after_a_write_is_passed_on(track: Track) -> None:
    client, conn = track.client()
    client.sendall(request(b"{}"))
    track.lane.board(conn)
    track.replies(client, 1)

    client.sendall(b"GET /jobs HTTP/1.1\r\n\r\n")
    track.turn_until(lambda: track.loop.left)

    assert track.loop.left == [(conn, b"GET /jobs HTTP/1.1\r\n\r\n")]


def test_a_client_that_goes_away_is_let_go_and_one_that_goes_in_the_middle_is_passed_on(track: Track) -> None:
    client, conn = track.client()
    client.sendall(request(b"{}"))
    track.lane.board(conn)
    track.replies(client, 1)
    client.close()
    track.turn_until(lambda: conn.closed)
    assert track.loop.nr_conns == 0

    client, conn = track.client()
    client.sendall(request(b"x" * 50)[:-1])
    client.shutdown(socket.SHUT_WR)
    track.lane.board(conn)
    track.turn_until(lambda: track.loop.left)
    assert track.loop.left[0][1] == request(b"x" * 50)[:-1]


def test_a_slow_sender_is_passed_on_with_its_receiving_ended() -> None:
    track = lay_track(grant_s=0.0)
    client, conn = track.client()
    client.sendall(request(b"x" * 50)[:-1])
    track.lane.board(conn)

    track.turn_until(lambda: track.loop.left)

    assert track.loop.left == [(conn, request(b"x" * 50)[:-1])]
    assert conn.sock.recv(10) == b""
    track.close()


def test_an_idle_connection_is_closed_and_one_in_work_is_not(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lane, "IDLE_S", -1.0)
    track.keeper.gate.clear()
    client, conn = track.client()
    client.sendall(request(b"{}"))
    track.lane.board(conn)
    track.lane.send_off()
    track.loop.turn(track.lane)
    assert not conn.closed

    track.keeper.gate.set()
    track.turn_until(lambda: conn.closed)
    assert _bodies(client.recv(1000)) == [b"{}"]


def test_a_client_that_asks_for_it_and_every_client_of_a_stopping_worker_is_told_goodbye(track: Track) -> None:
    client, conn = track.client()
    client.sendall(request(b"{}", "Connection: close"))
    track.lane.board(conn)
    track.turn_until(lambda: conn.closed)
    assert b"Connection: close" in client.recv(1000)

    client, conn = track.client()
    client.sendall(request(b"{}"))
    track.loop.alive = False
    track.lane.board(conn)
    track.turn_until(lambda: conn.closed)
    assert b"Connection: close" in client.recv(1000)
    assert track.loop.nr_conns == 0


def test_a_request_behind_the_goodbye_is_not_kept_with_the_bytes_of_another_connection(track: Track) -> None:
    """Its connection's memory goes to others while it still waits to be kept."""
    client, conn = track.client()
    client.sendall(request(b"first", "Connection: close"))
    track.lane.board(conn)
    track.lane.send_off()
    assert b"Connection: close" in client.recv(1000)  # the loop has not heard of it yet
    track.keeper.gate.clear()
    client.sendall(request(b"A" * 1000))
    track.loop.turn(track.lane)
    track.loop.turn(track.lane)
    other, other_conn = track.client()
    other.sendall(request(b"B" * 1000))
    track.lane.board(other_conn)

    track.keeper.gate.set()
    assert track.replies(other, 1) == [b"B" * 1000]

    assert track.keeper.bodies in (
        [b"first", b"B" * 1000],
        [b"first", b"A" * 1000, b"B" * 1000],
    ), [body[:3] for body in track.keeper.bodies]


def test_a_defect_of_the_keeper_closes_the_connections_and_the_lane_goes_on(track: Track) -> None:
    client, conn = track.client()
    client.sendall(request(b"broken"))
    track.lane.board(conn)
    track.turn_until(lambda: conn.closed)
    assert client.recv(100) == b""

    client, conn = track.client()
    client.sendall(request(b"whole"))
    track.lane.board(conn)
    assert track.replies(client, 1) == [b"whole"]


def test_what_the_lane_may_not_hold_is_passed_on(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lane, "LANE_BYTES", 400_000)
    track.keeper.gate.clear()
    (_first, first_conn), (_second, second_conn) = clients = [track.client(), track.client()]
    for client, conn in clients:
        client.sendall(request(b"x" * 150_000)[:10_000])
        track.lane.board(conn)
        track.loop.turn(track.lane)

    assert [conn for conn, _ in track.loop.left] == [first_conn, second_conn]
    track.keeper.gate.set()


def test_buffers_are_given_back(track: Track) -> None:
    for _ in range(3):
        client, conn = track.client()
        sender = threading.Thread(target=client.sendall, args=(request(b"x" * 500_000),))
        sender.start()
        track.turn_until(lambda: track.lane.wants(conn.sock))  # noqa: B023 - it is called in this round only
        track.lane.board(conn)
        track.turn_until(lambda: not sender.is_alive())  # noqa: B023 - as above
        track.replies(client, 1)
        client.close()
        track.turn_until(lambda: conn.closed)  # noqa: B023 - as above

    assert track.lane.held_bytes == 0


def test_large_writes_are_kept_a_few_at_a_time_so_that_answered_clients_send_meanwhile(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_lane, "MOST_BYTES_TOGETHER", 100_000)
    track.keeper.gate.clear()
    clients = [track.client() for _ in range(7)]
    for client, conn in clients:
        client.sendall(request(b"x" * 40_000))
        track.lane.board(conn)
    track.turn_until(lambda: not any(track.lane.wants(conn.sock) for _, conn in clients))
    track.keeper.gate.set()
    for client, _ in clients:
        assert track.replies(client, 1) == [b"x" * 40_000]
    assert sum(track.keeper.together) == 7
    assert max(track.keeper.together) <= 2


def test_one_write_larger_than_what_is_kept_together_is_kept_alone(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_lane, "MOST_BYTES_TOGETHER", 1000)
    client, conn = track.client()
    client.sendall(request(b"x" * 40_000))
    track.lane.board(conn)
    assert track.replies(client, 1) == [b"x" * 40_000]


def test_what_was_handed_over_is_kept_before_the_lane_closes(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lane, "MOST_BYTES_TOGETHER", 1)
    track.keeper.gate.clear()
    clients = [track.client() for _ in range(4)]
    for client, conn in clients:
        client.sendall(request(b"one"))
        track.lane.board(conn)
        track.loop.turn(track.lane)
    closing = threading.Thread(target=track.lane.close)
    closing.start()
    track.keeper.gate.set()
    closing.join(40)
    assert track.keeper.together == [1, 1, 1, 1]
    track.lane = WriteLane(track.loop, track.keeper, grant_s=lambda size: 15.0)


def test_memory_that_is_kept_for_the_next_requests_is_bounded(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lane, "KEPT_BYTES", 3 * write_lane.BUFFER_SIZES[0])
    clients = [track.client() for _ in range(6)]
    for client, conn in clients:
        client.sendall(request(b"one"))
        track.lane.board(conn)
    for client, conn in clients:
        track.replies(client, 1)
        client.close()
        track.turn_until(lambda: conn.closed)  # noqa: B023 - it is called in this round only
    assert track.lane.held_bytes == 0
    assert track.lane.kept_bytes == 3 * write_lane.BUFFER_SIZES[0]


def test_an_idle_connection_holds_no_buffer(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    client, conn = track.client()
    client.sendall(request(b"one"))
    track.lane.board(conn)
    track.replies(client, 1)
    track.turn_until(lambda: track.lane.held_bytes == 0)

    client.sendall(request(b"two"))
    assert track.replies(client, 1) == [b"two"]


def test_a_connection_answered_in_the_moment_it_is_paused_is_watched_again(
    track: Track, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request comes while the last one is kept: the loop stops watching just when the reply goes out."""
    unregister = track.loop.poller.unregister

    def unregister_late(fileobj: Any) -> Any:
        track.keeper.gate.set()
        client.settimeout(40)
        first.extend(client.recv(1000))
        return unregister(fileobj)

    first = bytearray()
    track.keeper.gate.clear()
    client, conn = track.client()
    client.sendall(request(b"one"))
    track.lane.board(conn)
    track.lane.send_off()
    client.sendall(request(b"two"))
    monkeypatch.setattr(track.loop.poller, "unregister", unregister_late)
    track.turn_until(lambda: first)
    monkeypatch.setattr(track.loop.poller, "unregister", unregister)

    assert _bodies(bytes(first)) == [b"one"]
    assert track.replies(client, 1) == [b"two"]
