"""Connections that misbehave, against a real server: cut, chunked, slow and lying bodies stop nobody else."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import requests

from tests.integration.conftest import BufferProcess
from tests.support import written


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer with one worker of four threads, which all of these have to survive."""
    folder = tmp_path_factory.mktemp("hostile")
    buffer = BufferProcess(folder, "--workers", "1", "--threads", "4", "--max-body-bytes", "100000")
    yield buffer
    buffer.stop()


@pytest.fixture
def served(server: BufferProcess) -> Iterator[BufferProcess]:
    """The buffer with an external job that nobody has written to yet."""
    server.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j", "fresh": True})
    yield server
    log = (server.folder / "data" / "logs" / "server.log").read_text()
    assert "the server has a defect" not in log
    assert "Traceback" not in log, log[-3000:]


def talk(buffer: BufferProcess, request: bytes, timeout_s: float = 10.0) -> bytes:
    """Sends bytes as they are and returns what comes back until the server closes or is silent."""
    with socket.create_connection(("127.0.0.1", buffer.port), timeout=timeout_s) as connection:
        connection.sendall(request)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
                if b"\r\n\r\n" in answer and answer.rstrip().endswith(b"}"):
                    break
        return answer


def post(headers: str, body: bytes) -> bytes:
    return f"POST /buffer/write HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + body


def still_well(buffer: BufferProcess) -> None:
    started = time.monotonic()
    assert buffer.client.job("j")["job_id"] == "j"
    assert buffer.client.write([written("good")], job_id="j")["success"]
    assert time.monotonic() - started < 15  # it would be for ever


ITEM = json.dumps({**written("chunked"), "job_id": "j"}).encode()


def test_a_chunked_body_is_taken(served: BufferProcess) -> None:
    pieces = [ITEM[at : at + 50] for at in range(0, len(ITEM), 50)]
    assert requests.post(f"{served.url}/buffer/write", data=iter(pieces), timeout=10).status_code == 200
    too_large = requests.post(f"{served.url}/buffer/write", data=iter([b" " * 60_000] * 4), timeout=10)
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "payload_too_large")
    still_well(served)


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (post("Transfer-Encoding: chunked", b"ZZZ\r\nbad\r\n0\r\n\r\n"), (b"400",)),
        (post("Transfer-Encoding: chunked", b"-1\r\n{}\r\n0\r\n\r\n"), (b"400",)),
        (post("Transfer-Encoding: gzip, chunked", b"0\r\n\r\n"), (b"400", b"415", b"501")),
        (post("Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"), (b"400",)),
        (post("Content-Length: abc", b"{}"), (b"400",)),
        (post("Content-Length: -1", b"{}"), (b"400",)),
        (post("Content-Length: 99999999999999999999", b"{}"), (b"413", b"400")),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n", (b"400",)),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (b"400", b"414")),
        (b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 500 + b"\r\n", (b"400", b"431")),
        (b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n", (b"400", b"431")),
    ],
)
def test_a_request_that_lies_about_itself_is_refused(
    served: BufferProcess, request_bytes: bytes, statuses: tuple[bytes, ...]
) -> None:
    answer = talk(served, request_bytes)
    assert answer.split(b" ")[1] in statuses, answer[:500]
    still_well(served)


def test_a_body_that_is_cut_off_changes_nothing(served: BufferProcess) -> None:
    for headers in (f"Content-Length: {len(ITEM)}", "Content-Length: 90000", "Transfer-Encoding: chunked"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(post(headers, ITEM[:60]))
    still_well(served)
    assert served.client.job("j")["outcomes"] == {"completed": 1}


def test_a_client_that_goes_while_its_requests_wait_in_line_leaves_no_traceback(served: BufferProcess) -> None:
    """What it asked for last may be answered when it is gone already."""
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    still_well(served)
    log = (served.folder / "data" / "logs" / "server.log").read_text()
    assert "cut off" not in log
    assert "without completing" not in log


@pytest.mark.slow
def test_slow_senders_do_not_keep_others_waiting(served: BufferProcess) -> None:
    """More slow connections than there are threads: headers that never end, bodies that trickle."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5)) for _ in range(12)]
        for at, connection in enumerate(slow):
            if at % 3 == 0:
                connection.sendall(b"POST /buffer/write HTTP/1.1\r\nHost: localhost\r\n")
            elif at % 3 == 1:
                connection.sendall(post("Content-Length: 50000", b'{"uid": "'))
        time.sleep(1.0)
        for second in range(40):
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{served.url}/jobs", timeout=1).ok and second > 0:
                    break
            time.sleep(0.2)
        else:
            pytest.fail("slow senders starved the server")
    still_well(served)
