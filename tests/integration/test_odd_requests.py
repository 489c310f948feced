"""Requests that no ordinary client sends: they are refused or harmless, and never leave their connection."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator

import pytest

from tests.integration.conftest import BufferProcess, server_workers, wait_until
from tests.support import written

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer that asks for no token, with an external job."""
    found = BufferProcess(tmp_path_factory.mktemp("odd"))
    found.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"})
    yield found
    found.stop()


@pytest.fixture
def lives(buffer: BufferProcess) -> Iterator[None]:
    """Sees that the same workers are there afterwards, answer, and logged no traceback."""
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
@pytest.mark.usefixtures("lives")
def test_an_odd_request_gets_an_answer_that_says_so(buffer: BufferProcess, says: bytes, allowed: set[int]) -> None:
    heard = talk(buffer.port, says)
    assert status(heard) in allowed, heard[:300]


@pytest.mark.usefixtures("lives")
def test_a_head_of_megabytes_is_cut_off(buffer: BufferProcess) -> None:
    heard = talk(buffer.port, b"GET /jobs HTTP/1.1\r\n", *[b"X: " + b"y" * 60_000 + b"\r\n"] * 100)
    assert status(heard) in (0, 431)


@pytest.mark.usefixtures("lives")
def test_pipelined_requests_are_answered_in_their_order(buffer: BufferProcess) -> None:
    paths = ["/health", "/jobs/j", "/nope", "/jobs", "/jobs/j"] * 40
    says = b"".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths)
    heard = talk(buffer.port, says + request("GET /health HTTP/1.1"))
    codes = [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]
    assert codes == [404 if path == "/nope" else 200 for path in paths] + [200]


@pytest.mark.usefixtures("lives")
def test_http_1_0_gets_whole_replies_and_no_chunks(buffer: BufferProcess) -> None:
    buffer.client.write(
        [written(f"ten-{number}", f"ten-{number}", extra_info={"x": "y" * 50_000}) for number in range(30)], job_id="j"
    )
    body = json.dumps({"job_id": "j", "max_groups": 30}).encode()
    says = f"POST /get_rollout_data HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    head, _, content = talk(buffer.port, says).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert len(json.loads(content)["data"]["data"]) == 30


@pytest.mark.usefixtures("lives")
def test_a_client_that_waits_for_continue_is_told_to_go_on_or_refused_before_it_sends(buffer: BufferProcess) -> None:
    head = (
        f"POST /buffer/write HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {len(ITEM)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", buffer.port), timeout=10) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 100")
        client.sendall(ITEM)
        assert b"200 OK" in client.recv(1000)
    refused = head.replace(f": {len(ITEM)}", ": 99999999999").encode()
    assert status(talk(buffer.port, refused)) == 413


@pytest.mark.usefixtures("lives")
def test_the_reply_to_a_body_that_is_not_wanted_reaches_who_still_sends_it(buffer: BufferProcess) -> None:
    large = b"x" * 4_000_000
    head = f"POST /nope HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(large)}\r\n\r\n".encode()
    heard = talk(buffer.port, head, large)
    assert status(heard) == 403
    assert b"connection: close" in heard.lower()


def mutated(rng: random.Random) -> bytes:
    """A request with some of its bytes changed, doubled, cut out or followed by nonsense."""
    lines = [
        "POST /buffer/write HTTP/1.1",
        "GET /jobs/j HTTP/1.1",
        "POST /get_rollout_data HTTP/1.1",
        "GET /health HTTP/1.0",
    ]
    odd = [
        "Upgrade: h2c", "Connection: Upgrade", "Transfer-Encoding: chunked", "Expect: 100-continue", "Cookie: =",
        "Transfer-Encoding: gzip", "Content-Encoding: gzip", "SCRIPT_NAME: /", "Host: x", "Content-Length: 5",
    ]  # fmt: skip
    says = bytearray(
        request(rng.choice(lines), *rng.sample(odd, rng.randrange(4)), body=ITEM[: rng.randrange(len(ITEM))])
    )
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(says))
        what = rng.randrange(4)
        if what == 0:
            says[at] = rng.randrange(256)
        elif what == 1:
            del says[at : at + rng.randrange(1, 40)]
        elif what == 2:
            says[at:at] = says[at : at + rng.randrange(1, 200)]
        else:
            says += rng.randbytes(rng.randrange(1, 300))
        says = says or bytearray(b"x")
    return bytes(says)


def fuzz(port: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client, contextlib.suppress(OSError):
            client.sendall(mutated(rng))
            client.settimeout(0.002 if rng.random() < 0.9 else 0.05)
            client.recv(65536)


@pytest.mark.usefixtures("lives")
def test_nonsense_on_hundreds_of_connections_ends_no_worker(buffer: BufferProcess) -> None:
    fuzz(buffer.port, 300, seed=1)
