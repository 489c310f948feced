"""Writes of odd clients, side by side, against a real server: each gets its answer, and nothing is lost or doubled."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import BufferProcess
from tests.support import written

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def job(served: BufferProcess) -> str:
    return served.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1}).job_id


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers]).encode() + b"\r\n\r\n"


def whole(job: str, item: dict[str, Any], *headers: str) -> bytes:
    body = json.dumps({"job_id": job, **item}).encode()
    return head("/buffer/write", f"Content-Length: {len(body)}", *headers) + body


class Client:
    """A connection that says and hears bytes."""

    def __init__(self, buffer: BufferProcess) -> None:
        self._socket = socket.create_connection(("127.0.0.1", buffer.port), timeout=30)
        self._held = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._socket.sendall(piece)

    def hear(self) -> tuple[int, dict[str, Any]]:
        while True:
            heads, mark, rest = self._held.partition(b"\r\n\r\n")
            if mark and heads.startswith(b"HTTP/1.1 100"):
                self._held = rest
                continue
            if mark:
                lines = heads.lower().split(b"\r\n")
                size = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length"))
                if len(rest) >= size:
                    self._held = rest[size:]
                    return int(heads.split()[1]), json.loads(rest[:size])
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError(f"closed after {self._held!r}")
            self._held += received


def statuses(reply: dict[str, Any]) -> list[str]:
    return [result["status"] for result in reply["results"]]


def test_one_connection_may_write_in_every_way_there_is(served: BufferProcess, job: str) -> None:
    chunk = json.dumps({"job_id": job, **written("chunked", "chunked")}).encode()
    with Client(served) as client:
        client.say(whole(job, written("plain", "plain")))
        assert statuses(client.hear()[1]) == ["stored"]
        client.say(head("/buffer/write", "Transfer-Encoding: chunked"))
        client.say(f"{len(chunk):x}\r\n".encode(), chunk, b"\r\n0\r\n\r\n")
        assert statuses(client.hear()[1]) == ["stored"]
        client.say(whole(job, written("expected", "expected"), "Expect: 100-continue"))
        assert statuses(client.hear()[1]) == ["stored"]
        client.say(f"GET /jobs/{job} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.hear()[1]["job_id"] == job
        client.say(whole(job, written("large", "large", extra_info={"note": "x" * 9_000_000})))
        assert statuses(client.hear()[1]) == ["stored"]
        client.say(
            whole(job, written("plain", "plain")),
            whole(job, written("first", "first")),
            whole(job, written("second", "second")),
        )
        assert [statuses(client.hear()[1]) for _ in range(3)] == [["duplicate"], ["stored"], ["stored"]]

    assert served.client.job(job)["groups"]["ready"] == 6


def test_a_bad_write_fails_alone_among_many(served: BufferProcess, job: str) -> None:
    bad = {
        "wrong type": (400, whole(job, {**written("a", "wrong"), "reward": "much"})),
        "no job": (404, whole(job, {**written("b", "nojob"), "job_id": "nobody"})),
        "unknown image": (400, whole(job, written("c", "img", messages=shows("sha256:" + "0" * 64)))),
        "no JSON": (400, head("/buffer/write", "Content-Length: 4") + b"{nop"),
        "not finite": (400, head("/buffer/write", "Content-Length: 16") + b'{"reward": NaN} '),
    }
    gate = threading.Barrier(len(bad) * 4)
    answers: list[tuple[str, int]] = []

    def drive(name: str, number: int) -> None:
        with Client(served) as client:
            gate.wait()
            for turn in range(10):
                client.say(whole(job, written(f"{name}-{number}-{turn}", f"{name}-{number}-{turn}")))
                answers.append(("good", client.hear()[0]))
                client.say(bad[name][1])
                answers.append((name, client.hear()[0]))

    threads = [threading.Thread(target=drive, args=(name, number)) for name in bad for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    expected = {name: status for name, (status, _) in bad.items()} | {"good": 200}
    assert {(name, status) for name, status in answers} == set(expected.items())
    told = served.client.job(job)
    assert told["groups"]["ready"] == 200
    assert told["outcomes"]["completed"] == 200


def shows(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_the_same_item_over_many_connections_at_once_is_one_item(served: BufferProcess, job: str) -> None:
    gate = threading.Barrier(12)
    results: list[str] = []

    def drive() -> None:
        with Client(served) as client:
            gate.wait()
            for turn in range(10):
                client.say(whole(job, written(f"u{turn}", f"i{turn}", extra_info={"note": "x" * 40_000})))
                results.extend(statuses(client.hear()[1]))

    threads = [threading.Thread(target=drive) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == ["duplicate"] * 110 + ["stored"] * 10
    assert served.client.job(job)["groups"]["ready"] == 10


def test_a_write_that_is_refused_for_its_token_or_its_size_leaves_the_connection(
    start_buffer: Callable[..., BufferProcess], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a secret of sixteen letters")
    buffer = start_buffer("--token-file", str(tmp_path / "token"), "--max-body-bytes", "2000")
    carried = "Authorization: Bearer a secret of sixteen letters"
    with Client(buffer) as client:
        body = json.dumps({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "job"}).encode()
        client.say(head("/start_rollout", carried, f"Content-Length: {len(body)}") + body)
        assert client.hear()[0] == 200
        client.say(whole("job", written("a")))
        status, reply = client.hear()
        assert (status, reply["error"]["code"]) == (401, "unauthorized")
        client.say(whole("job", written("a"), "Authorization: Bearer wrong"), whole("job", written("a"), carried))
        assert [client.hear()[0] for _ in range(2)] == [401, 200]
        client.say(whole("job", written("b", extra_info={"note": "x" * 3000}), carried))
        status, reply = client.hear()
        assert (status, reply["error"]["code"]) == (413, "payload_too_large")


def test_the_reply_to_as_many_items_as_a_write_may_have_comes_whole(served: BufferProcess, job: str) -> None:
    items = [written(f"{'u' * 200}-{number}", f"i{number}") for number in range(100)]
    with Client(served) as client:
        client.say(whole(job, {"items": items}))
        assert statuses(client.hear()[1]) == ["stored"] * 100
        client.say(whole(job, written("next", "next")))
        assert statuses(client.hear()[1]) == ["stored"]
