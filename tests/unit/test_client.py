"""The two clients are one: the blocking one has every call of the awaitable one, and sends and raises the same."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
from werkzeug.wrappers import Request as HttpRequest
from werkzeug.wrappers import Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.client import (
    AsyncRolloutBufferClient,
    Request,
    RolloutBufferClient,
    _raise_for_status,
    why_no_answer,
)
from slime_plugins.rollout_buffer.errors import ConfigError, NotFoundError, RolloutBufferError, network_reason
from tests.asgi_client import serving_wsgi

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "start_rollout": (({"rollout_task_type": "math"},), {}),
    "get_rollout_data": ((), {"job_id": "a", "wait_s": 2.0, "ack": ["d"], "lease_s": 5.0}),
    "ack": ((["d"],), {}),
    "write": (([{"uid": "u"}],), {"job_id": "a"}),
    "jobs": ((), {}),
    "job": (("a/b",), {}),
    "cancel": (("a",), {}),
    "pause": (("a",), {}),
    "drain": (("a",), {}),
    "mismatch": (("a",), {}),
    "report_training": (("a", [{"uid": "u", "advantage": float("inf")}]), {"step": 1}),
    "resume": (("a",), {}),
    "deliveries": (("a",), {"limit": 3}),
    "delivery": (("d",), {"images": "hash"}),
    "delivery_body": (("d",), {}),
    "trajectories": ((), {"min_reward": 0.5}),
    "trajectory": (("u",), {"job_id": "a"}),
    "groups": (("a",), {"state": "open"}),
    "attempts": (("a",), {"transcripts": True}),
    "group": ((7,), {}),
    "explanation": (("a",), {}),
    "health": ((), {}),
    "get_image": (("0" * 64,), {}),
}


@pytest.fixture
def heard() -> Iterator[tuple[str, list[tuple[str, str, bytes, str | None]]]]:
    """A server that refuses everything, its address, and what it was asked: method, path, body and token."""
    asked: list[tuple[str, str, bytes, str | None]] = []

    @HttpRequest.application
    def refuse(request: HttpRequest) -> Response:
        path = request.environ["REQUEST_URI"]
        asked.append((request.method, path, request.get_data(), request.headers.get("Authorization")))
        return Response(json.dumps(wire.encode_error("not_found", "no such job")), 404)

    with serving_wsgi(refuse) as url:
        yield f"{url}/", asked


def public(kind: type) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


def test_every_call_is_in_both_with_one_signature_and_one_docstring() -> None:
    blocking, awaiting = public(RolloutBufferClient), public(AsyncRolloutBufferClient)
    del awaiting["close"]
    assert set(blocking) == set(awaiting) == set(CALLS)
    for name, method in blocking.items():
        assert inspect.signature(method) == inspect.signature(awaiting[name])
        assert method.__doc__ == awaiting[name].__doc__
        assert method.__qualname__ == f"RolloutBufferClient.{name}"
        assert not inspect.iscoroutinefunction(inspect.unwrap(method))


@pytest.mark.parametrize("name", CALLS)
def test_both_send_the_same_and_raise_the_same(
    heard: tuple[str, list[tuple[str, str, bytes, str | None]]], name: str
) -> None:
    url, asked = heard
    arguments, options = CALLS[name]

    async def ask() -> None:
        async with AsyncRolloutBufferClient(url, token="secret") as client:
            await getattr(client, name)(*arguments, **options)

    with pytest.raises(NotFoundError) as awaited:
        asyncio.run(ask())
    with pytest.raises(NotFoundError) as blocked:
        getattr(RolloutBufferClient(url, token="secret"), name)(*arguments, **options)
    first, second = ((method, path, json.loads(body or b"null"), token) for method, path, body, token in asked)
    assert first == second
    assert first[3] == "Bearer secret"
    assert type(awaited.value) is type(blocked.value)
    assert isinstance(blocked.value, aiohttp.ClientError)
    assert isinstance(blocked.value, RolloutBufferError)


async def test_a_long_poll_has_its_wait_beyond_the_time_of_a_call() -> None:
    class Recording:
        def __init__(self) -> None:
            self.sent: list[tuple[Request, float]] = []

        async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
            self.sent.append((request, timeout_s))
            return 200, b'{"success": false, "data": {"data": []}, "message": "none yet"}'

        async def close(self) -> None:
            self.sent.clear()

    transport = Recording()
    client = AsyncRolloutBufferClient("http://nowhere", timeout_s=10, transport=transport)
    await client.get_rollout_data(wait_s=25)
    await client.get_rollout_data(lease_s=5)
    (polled, timeout_s), (leasing, short_s) = transport.sent
    assert (timeout_s, short_s) == (35, 10)
    assert json.loads(polled.body or b"") == {"wait_s": 25, "dummies": True}
    assert json.loads(leasing.body or b"") == {"lease_s": 5}
    await client.close()
    assert transport.sent == []


def test_more_items_than_one_write_takes_are_sent_in_several() -> None:
    class Answering:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
            body = json.loads(request.body or b"")
            assert body["job_id"] == "j"
            items = body["items"]
            self.sizes.append(len(items))
            results = [{"uid": item["uid"], "status": "stored"} for item in items]
            return 200, json.dumps({"success": True, "job_id": "j", "results": results}).encode()

        async def close(self) -> None:
            pass

    transport = Answering()
    client = AsyncRolloutBufferClient("http://nowhere", transport=transport)
    reply = asyncio.run(client.write([{"uid": f"u{number}"} for number in range(250)], job_id="j"))
    assert transport.sizes == [100, 100, 50]
    assert reply["success"]
    assert [result["uid"] for result in reply["results"]] == [f"u{number}" for number in range(250)]

    large = "x" * (7 * 1024 * 1024)
    asyncio.run(client.write([{"uid": str(number), "text": large * (number % 3)} for number in range(5)], job_id="j"))
    assert transport.sizes[3:] == [2, 2, 1]  # 0 and 7, 14 and 0, 7 MB


def test_no_password_and_no_token_is_in_what_is_said_of_a_call_that_fails() -> None:
    with pytest.raises(requests.ConnectionError) as failed:
        RolloutBufferClient("http://user:secret@127.0.0.1:9").jobs()
    assert why_no_answer(failed.value) == "no answer from the buffer at http://***@127.0.0.1:9: Connection refused"
    for token in ("secret\n", "sécret"):
        with pytest.raises(ConfigError, match=r"^the token .* is not ASCII$"):
            RolloutBufferClient("http://127.0.0.1:9", token=token)


def test_the_token_is_sent_to_the_server_itself_whatever_netrc_and_proxies_the_user_has(
    heard: tuple[str, list[tuple[str, str, bytes, str | None]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login user password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(NotFoundError):
        RolloutBufferClient(heard[0], token="secret").jobs()
    assert heard[1][0][-1] == "Bearer secret"


def test_a_reply_without_what_a_call_returns_is_no_buffers() -> None:
    class Foreign:
        async def send(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
            return 200, b"{}"

        async def close(self) -> None: ...

    client = AsyncRolloutBufferClient("http://h", transport=Foreign())
    for call in (client.jobs(), client.write([{"uid": "u"}]), client.get_rollout_data()):
        with pytest.raises(wire.InvalidReplyError):
            asyncio.run(call)


def test_an_error_class_of_a_caller_replaces_none_of_the_clients() -> None:
    class OfACallerError(NotFoundError):
        def __init__(self) -> None:
            super().__init__("mine")

    with pytest.raises(NotFoundError, match=r"^no such job$") as raised:
        _raise_for_status(404, json.dumps(wire.encode_error("not_found", "no such job")).encode())
    assert not isinstance(raised.value, OfACallerError)


def test_errors_come_back_as_they_were_written() -> None:
    said = json.dumps(wire.encode_error("not_found", "no such job", {"job": "a"})).encode()
    assert wire.decode_error(said) == ("not_found", "no such job", {"job": "a"})
    assert wire.decode_error(json.dumps(wire.encode_error("busy", "wait")).encode()) == ("busy", "wait", {})


def tls_error(reason: str, *, verify: str = "") -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "") if verify else ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1006)")
    error.reason = reason
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_message = verify
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "it took too long"),
        (requests.exceptions.ReadTimeout("read"), "it took too long"),
        (tls_error("WRONG_VERSION_NUMBER"), "it answers without TLS: its address begins with http, not https"),
        (tls_error("UNEXPECTED_EOF_WHILE_READING"), "the TLS connection failed: unexpected eof while reading"),
        (tls_error("", verify="certificate has expired"), "its certificate is not trusted: certificate has expired"),
        (aiohttp.ServerDisconnectedError(), "the connection broke"),
    ],
)
def test_what_the_network_did_is_said_in_a_few_words(error: Exception, says: str) -> None:
    outer = RuntimeError("a library's own, with <object at 0x7f>")
    outer.__cause__ = error

    assert network_reason(error).startswith(says)
    assert isinstance(error, requests.RequestException) or network_reason(outer).startswith(says)
