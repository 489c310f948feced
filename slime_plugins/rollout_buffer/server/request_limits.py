"""ASGI middleware: size limits of bodies, and time limits for sending a body and reading a reply.

The application is called with the whole body, so a slow or vanished client holds only its connection. Limits of heads
are gunicorn's; ``deploy/nginx.conf`` adds time limits for a public port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.errors import UnavailableError, UnreadableBodyError

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_LIMIT_S = 15.0
"""Seconds that a body may take, in addition to its transfer at ``MIN_BYTES_PER_S``."""
MIN_BYTES_PER_S = 100_000
SEND_LIMIT_S = 120.0
"""Time limit for a client to read what was sent."""
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is received and dropped, so that the client reads the reply."""
FREE_BYTES = 1024 * 1024
"""Bodies up to this size, in bytes, are accepted even if other bodies hold all the permitted memory."""


class ClientGoneError(Exception):
    """The client has disconnected, or does not read the reply."""


@dataclass(frozen=True, slots=True)
class BodyCap:
    """The size limit of a body, and the function that makes the error for a larger body."""

    max_bytes: int
    error: Callable[[], Exception]


class RequestLimits:
    """Calls an application with whole bodies and with a ``send`` that times out."""

    def __init__(
        self,
        application: Callable[[Scope, bytes, Receive, Send], Awaitable[None]],
        *,
        check: Callable[[Scope], BodyCap],
        refuse: Callable[[Scope, Exception, Receive, Send], Awaitable[None]],
        max_requests: int,
        max_held_bytes: int,
    ) -> None:
        """``check`` gets the head before the body is read; ``refuse`` answers an error.

        At most ``max_requests`` run at a time; their large bodies may hold ``max_held_bytes`` together.
        """
        self._application, self._check, self._refuse = application, check, refuse
        self._max_requests, self._max_held_bytes = max_requests, max_held_bytes
        self._requests = self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; drops a client that has disconnected or does not read."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_LIMIT_S):
                    await send(message)
            except TimeoutError as error:
                raise ClientGoneError from error

        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        body = bytearray()
        self._requests += 1
        try:
            await self._answer(scope, body, receive, send_in_time)
        except ClientGoneError:
            pass
        finally:
            self._requests -= 1
            self._held_bytes -= len(body)

    async def _answer(self, scope: Scope, body: bytearray, receive: Receive, send: Send) -> None:
        try:
            if self._requests > self._max_requests:
                raise UnavailableError("too many requests are being answered: send it again later")
            await self._receive(scope, body, receive)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - it is the answer to this request
            await self._refuse(scope, error, receive, send)
        else:
            await self._application(scope, bytes(body), receive, send)

    async def _receive(self, scope: Scope, body: bytearray, receive: Receive) -> None:
        cap = self._check(scope)
        if (declared_size(scope) or 0) > cap.max_bytes:
            raise cap.error()
        started, more = asyncio.get_running_loop().time(), True
        try:
            async with asyncio.timeout(BODY_LIMIT_S) as limit:
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGoneError
                    body += message["body"]
                    self._held_bytes += len(message["body"])
                    if len(body) > cap.max_bytes:
                        raise cap.error()
                    if len(body) > FREE_BYTES and self._held_bytes > self._max_held_bytes:
                        raise UnavailableError("too many large bodies are arriving at once: send it again later")
                    limit.reschedule(started + BODY_LIMIT_S + len(body) / MIN_BYTES_PER_S)
                    more = message["more_body"]
        except TimeoutError as error:
            raise UnreadableBodyError("the body did not arrive completely within the timeout; send it again") from error


def declared_size(scope: Scope) -> int | None:
    """Returns the size of the body that the head declares; None for a chunked body."""
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        return None
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


async def drain(receive: Receive) -> None:
    """Receives and drops the rest of a body, up to ``LINGER_S``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
