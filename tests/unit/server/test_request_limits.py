"""The middleware: what a client may send, how long it may take, and what is answered to more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import PayloadTooLargeError
from slime_plugins.rollout_buffer.server import request_limits
from slime_plugins.rollout_buffer.server.request_limits import BodyCap, RequestLimits

MB = 1024 * 1024
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/buffer/write", "headers": []}


class Client:
    """Sends pieces of a body, and then nothing more; reads nothing of a reply when it ``hangs``."""

    def __init__(self, *sizes: int, hangs: bool = False, gone: bool = False) -> None:
        self.messages = [{"type": "http.request", "body": b" " * size, "more_body": True} for size in sizes]
        if gone:
            self.messages.append({"type": "http.disconnect"})
        self._hangs = hangs
        self.sent: list[Any] = []

    @classmethod
    def whole(cls, size: int, **how: bool) -> Client:
        """One whose body is all there."""
        client = cls(size, **how)
        client.messages[-1]["more_body"] = False
        return client

    async def receive(self) -> Any:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Any) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        self.sent.append(message)


class Server:
    """The middleware around an application that counts what reaches it."""

    def __init__(self, *, max_requests: int = 10, max_held_bytes: int = 3 * MB) -> None:
        self.bodies: list[bytes] = []
        self.errors: list[Exception] = []
        self.waits: asyncio.Event | None = None
        self.limits = RequestLimits(
            self._answer,
            check=lambda scope: BodyCap(
                100 * MB if scope["path"] != "/small" else 10, lambda: PayloadTooLargeError("more")
            ),
            refuse=self._refuse,
            max_requests=max_requests,
            max_held_bytes=max_held_bytes,
        )

    async def serve(self, client: Client, path: str = "/buffer/write", **headers: str) -> None:
        encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.limits({**SCOPE, "path": path, "headers": encoded}, client.receive, client.send)

    async def _answer(self, _scope: Any, body: bytes, _receive: Any, send: Any) -> None:
        self.bodies.append(body)
        if self.waits is not None:
            await self.waits.wait()
        await send({"type": "http.response.start"})

    async def _refuse(self, _scope: Any, error: Exception, _receive: Any, send: Any) -> None:
        self.errors.append(error)
        await send({"type": "http.response.start"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    monkeypatch.setattr(request_limits, "BODY_LIMIT_S", 0.1)
    monkeypatch.setattr(request_limits, "SEND_LIMIT_S", 0.1)


async def test_the_application_gets_a_whole_body_and_nothing_of_one_that_ends_early() -> None:
    server = Server()
    await server.serve(Client.whole(7))
    await server.serve(Client(5, gone=True))
    assert (server.bodies, server.errors) == ([b" " * 7], [])


async def test_a_body_that_stops_coming_is_refused_after_its_deadline() -> None:
    server = Server()
    await asyncio.wait_for(server.serve(Client(5)), 10)
    assert [type(error).__name__ for error in server.errors] == ["UnreadableBodyError"]


@pytest.mark.parametrize("client", [Client(6, 6), Client.whole(11)])
async def test_more_than_the_cap_of_its_route_is_refused_whatever_its_head_says(client: Client) -> None:
    server = Server()
    await server.serve(client, "/small")
    assert [str(error) for error in server.errors] == ["more"]


async def test_more_than_the_cap_in_a_head_is_refused_before_a_byte_is_read() -> None:
    server, client = Server(), Client.whole(11)
    await server.serve(client, "/small", content_length="11")
    assert len(server.errors) == len(client.messages) == 1


async def test_large_bodies_share_a_budget_which_is_free_again_afterwards() -> None:
    server = Server(max_held_bytes=3 * MB)
    await server.serve(Client(2 * MB, 2 * MB, 2 * MB))
    assert [type(error).__name__ for error in server.errors] == ["UnavailableError"]
    for _ in range(3):
        whole = Client(3 * MB, 0)
        whole.messages[-1]["more_body"] = False
        await server.serve(whole)
    assert len(server.bodies) == 3


async def test_a_request_more_than_there_may_be_at_a_time_is_refused() -> None:
    server = Server(max_requests=1)
    server.waits = asyncio.Event()
    first = asyncio.ensure_future(server.serve(Client.whole(1)))
    await asyncio.sleep(0)
    await server.serve(Client.whole(1))
    server.waits.set()
    await first
    await server.serve(Client.whole(1))
    assert ([type(error).__name__ for error in server.errors], len(server.bodies)) == (["UnavailableError"], 2)


async def test_a_client_that_does_not_read_its_reply_is_disconnected_at_its_deadline() -> None:
    await asyncio.wait_for(Server().serve(Client.whole(1, hangs=True)), 10)


async def test_a_websocket_is_closed() -> None:
    client = Client()
    await Server().limits({"type": "websocket"}, client.receive, client.send)
    assert client.sent == [{"type": "websocket.close"}]
