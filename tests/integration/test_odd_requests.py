"""Requests that no ordinary client sends: they are refused or harmless, and disturb no other connection."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.integration.conftest import BufferProcess, server_workers
from tests.support import written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer that asks for no token, with an external job."""
    found = BufferProcess(tmp_path_factory.mktemp("odd"))
    found.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"})
    yield found
    found.stop()


@pytest.fixture
def workers_survive(buffer: BufferProcess) -> Iterator[None]:
    """Asserts that the same workers are there afterwards, answer, and have logged no traceback."""
    before = wait_until(lambda: len(found := server_workers(buffer)) == 2 and found, what="two workers")
    yield
    assert buffer.client.job("j")["job_id"] == "j"
    assert server_workers(buffer) == before
    log = (buffer.folder / "data" / "logs" / "server.log").read_text()
    assert "Traceback" not in log, log[-3000:]


def talk(port: int, *says: bytes, timeout_s: float = 5.0) -> bytes:
    """Says something and returns what comes back until the server closes or is silent."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        with contextlib.suppress(OSError):
            for piece in says:
                client.sendall(piece)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while piece := client.recv(65536):
                heard += piece
        return heard


def status(heard: bytes) -> int:
    return int(heard.split(b" ", 2)[1]) if heard.startswith(b"HTTP/1.1 ") else 0


def request(line: str, *headers: str, body: bytes = b"", host: str = "localhost") -> bytes:
    size = [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([line, f"Host: {host}", "Connection: close", *size, *headers, "", ""]).encode("latin-1") + body


ITEM = json.dumps({**written("odd", "odd"), "job_id": "j"}).encode()


@pytest.mark.parametrize(
    ("says", "allowed"),
    [
        (request("POST /buffer/write HTTP/1.1", "Transfer-Encoding: chunked", body=ITEM), {400}),
        (request("POST /buffer/write HTTP/1.1", "Content-Length: 3", body=ITEM), {400}),
        (request("POST /buffer/write HTTP/1.1", "Transfer-Encoding: chunked") + b"zz\r\n", {400}),
        (request("POST /buffer/write HTTP/1.1", "Content-Length: 99999999999999999999"), {413}),
        (request("POST /buffer/write HTTP/1.1", "Expect: 100-continue", "Content-Length: 99999999999"), {413}),
        (request("POST /buffer/write HTTP/1.1", "Upgrade: websocket", body=ITEM), {200}),
        (request("GET /health HTTP/1.1", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"), {200}),
        (request("GET /jobs/%00 HTTP/1.1"), {404}),
        (request("GET /jobs?x=\xff HTTP/1.1"), {200, 400}),
        (request("GET /jobs HTTP/1.1", "SCRIPT_NAME: /x", "PATH_INFO: /health", "REMOTE_USER: root"), {200}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n", {400}),
        (request("GET /" + "a" * 20_000 + " HTTP/1.1"), {414}),
        (request("GET /jobs HTTP/1.1", *(f"X-{number}: y" for number in range(200))), {431}),
        (request("GET /jobs HTTP/1.1", "X: " + "y" * 60_000), {431}),
        (request("DELETE /buffer/write HTTP/1.1"), {405}),
        (request("GET /health HTTP/1.1", host="evil.example"), {403}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("workers_survive")
def test_an_odd_request_gets_an_allowed_status(buffer: BufferProcess, says: bytes, allowed: set[int]) -> None:
    heard = talk(buffer.port, says)
    assert status(heard) in allowed, heard[:300]


@pytest.mark.usefixtures("workers_survive")
def test_the_refusal_of_a_body_reaches_a_client_that_still_sends_it(buffer: BufferProcess) -> None:
    large = b"x" * 4_000_000
    head = f"POST /nope HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(large)}\r\n\r\n".encode()
    heard = talk(buffer.port, head, large)
    assert status(heard) == 403
    assert b"connection: close" in heard.lower()
