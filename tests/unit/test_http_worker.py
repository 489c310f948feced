"""The worker: what it sends arrives byte for byte, however the system cuts it, and connections are shared out."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer import http_worker
from slime_plugins.rollout_buffer.http_worker import Shares, limit_patience, send_pieces
from tests.example_counts import examples

PIECES = st.binary(max_size=40) | st.integers(1, 30_000).map(lambda size: b"x" * size)


def received_over(parts: Sequence[Sequence[bytes]], environ: dict[str, Any], buffer: int = 4096) -> bytes:
    """What a client of a connection with small buffers gets, and then what is left to the general way."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        got = bytearray()

        def receive() -> None:
            while data := theirs.recv(1 << 16):
                got.extend(data)

        receiver = threading.Thread(target=receive)
        receiver.start()
        passed_on = b"".join(send_pieces({"gunicorn.socket": ours, **environ}, parts))
        ours.shutdown(socket.SHUT_WR)
        receiver.join(30)
        return bytes(got) + passed_on


def unchunked(content: bytes) -> list[bytes]:
    chunks = []
    while content:
        size, rest = content.split(b"\r\n", 1)
        length = int(size, 16)
        chunks.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        content = rest[length + 2 :]
    return chunks


@examples(60)
@given(
    st.lists(
        st.lists(st.binary(max_size=40) | st.integers(1, 30_000).map(lambda size: b"x" * size), max_size=12), max_size=4
    )
)
def test_every_part_is_one_chunk_and_a_part_of_nothing_is_none(parts: list[list[bytes]]) -> None:
    whole = [b"".join(part) for part in parts]
    content = received_over(parts, {"SERVER_PROTOCOL": "HTTP/1.1"})
    assert unchunked(content) == [part for part in whole if part]


def test_more_pieces_than_the_system_takes_at_once_arrive_in_order() -> None:
    part = [b"%d," % number for number in range(5 * http_worker.MOST_PIECES_AT_ONCE)]
    assert unchunked(received_over([part], {"SERVER_PROTOCOL": "HTTP/1.1"})) == [b"".join(part)]


def test_memory_that_is_used_again_after_its_part_was_sent_does_not_change_what_arrives() -> None:
    memory = bytearray(200_000)

    def parts() -> Any:
        for letter in b"abc":
            memory[:] = bytes([letter]) * len(memory)
            yield [memoryview(memory)]

    got = received_over(parts(), {"SERVER_PROTOCOL": "HTTP/1.1"})
    assert unchunked(got) == [letter * 200_000 for letter in (b"a", b"b", b"c")]


@pytest.mark.parametrize(
    "environ",
    [
        {"SERVER_PROTOCOL": "HTTP/1.0"},
        {"SERVER_PROTOCOL": "HTTP/1.1", "gunicorn.socket": None},
        {"SERVER_PROTOCOL": "HTTP/2"},
    ],
)
def test_other_connections_get_joined_parts_in_the_general_way(environ: dict[str, Any]) -> None:
    assert received_over([[b"one", b"two"], [b"three"]], environ) == b"onetwothree"


def test_a_client_that_goes_in_the_middle_ends_the_reply_with_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError, match="Broken pipe"):
        list(send_pieces({"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.1"}, [[b"x" * 1000]]))


def test_a_client_that_does_not_read_does_not_keep_a_thread_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_worker, "READ_PATIENCE_S", 0.05)
    ours, theirs = connected_over_tcp()
    environ = {"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.1"}
    with ours, theirs, pytest.raises(BrokenPipeError, match="does not read"):
        list(send_pieces(environ, [[b"x" * 10_000_000]]))


def test_a_client_that_reads_slowly_but_without_a_pause_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system calls a connection writable when a third of its memory is free, which can be more than a megabyte."""
    monkeypatch.setattr(http_worker, "READ_PATIENCE_S", 1.0)
    ours, theirs = connected_over_tcp()
    pace = threading.Event()
    theirs.settimeout(10)

    def read_slowly() -> None:
        for _ in range(80):
            if theirs.recv(40_000) == b"" or pace.wait(0.1):
                break
        while theirs.recv(1 << 20):
            pass

    reader = threading.Thread(target=read_slowly)
    reader.start()
    environ = {"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.1"}
    with theirs:
        try:
            with ours:
                list(send_pieces(environ, [[b"x" * 524_288]] * 14))
        finally:
            pace.set()
            reader.join(30)


def test_an_error_before_the_first_part_comes_before_the_head_so_that_it_is_answered_as_an_error() -> None:
    def broken(_: int) -> Sequence[bytes]:
        raise ValueError("the first payload's row is broken")

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="row is broken"):
        next(send_pieces({"gunicorn.socket": ours, "SERVER_PROTOCOL": "HTTP/1.1"}, map(broken, [0])))


@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.2"])
def test_other_versions_of_http_do_not_keep_a_thread_for_ever_either(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_worker, "READ_PATIENCE_S", 0.1)
    ours, theirs = connected_over_tcp()
    ended = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            for data in send_pieces({"gunicorn.socket": ours, "SERVER_PROTOCOL": protocol}, [[b"x" * 20_000_000]]):
                ours.sendall(data)  # as gunicorn does
        ended.set()

    sender = threading.Thread(target=send)
    sender.start()
    gave_up = ended.wait(5)
    theirs.close()
    sender.join(10)
    ours.close()
    assert gave_up


def connected_over_tcp() -> tuple[socket.socket, socket.socket]:
    """A connection that the worker has accepted, and its client's side."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    limit_patience(ours)
    return ours, theirs


# --- shares ----------------------------------------------------------------------------------------------------------


def test_who_has_more_connections_than_another_worker_is_ahead() -> None:
    shares = Shares()
    assert not shares.is_ahead(5)  # there is no other
    with other_worker(shares, connections=3):
        assert shares.is_ahead(4)
        assert not shares.is_ahead(3)
        assert not shares.is_ahead(2)


def test_a_worker_that_is_gone_is_not_waited_for() -> None:
    shares = Shares()
    with other_worker(shares, connections=0):
        assert shares.is_ahead(1)
    assert not shares.is_ahead(1)


@contextmanager
def other_worker(shares: Shares, connections: int) -> Iterator[None]:
    """A process that lives for a block, of which the shared memory says how many connections it has."""
    process = subprocess.Popen(["sleep", "60"])
    shares.note(0, 100, os.getpid())
    shares.note(1, connections, process.pid)
    yield
    process.kill()
    process.wait()
