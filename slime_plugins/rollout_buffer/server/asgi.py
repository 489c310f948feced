"""The application that the HTTP server calls: receives bodies, answers the data routes, and leaves the rest to Flask.

The event loop receives, waits and sends; threads do what blocks. A client that is slow with its request, or with
reading its reply, therefore holds nothing but its connection; ``server/connection_limits.py`` says how many of those
may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from flask import Flask
from werkzeug.exceptions import (
    HTTPException,
    MethodNotAllowed,
    RequestEntityTooLarge,
    RequestHeaderFieldsTooLarge,
    RequestURITooLarge,
)

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.config import SETTINGS_VARIABLE, ServeSettings
from slime_plugins.rollout_buffer.errors import RolloutBufferError, UnauthorizedError, UnavailableError
from slime_plugins.rollout_buffer.protocol.auth import is_open
from slime_plugins.rollout_buffer.server.app import create_app
from slime_plugins.rollout_buffer.server.body_limits import body_limit
from slime_plugins.rollout_buffer.server.connection_limits import ConnectionLimits, RequestState, Unlimited, affordable
from slime_plugins.rollout_buffer.server.http import (
    LARGE_BODY,
    Answer,
    Part,
    ServerContext,
    check_request,
    error_answer,
)
from slime_plugins.rollout_buffer.server.poll_watcher import PollWatcher
from slime_plugins.rollout_buffer.server.rate_limiter import RateLimiter
from slime_plugins.rollout_buffer.server.request_bodies import (
    SMALL_BODY,
    BodyBudget,
    ClientGoneError,
    HeldBody,
    drain,
    read_body,
)
from slime_plugins.rollout_buffer.server.routes_data import (
    Poll,
    WriteBody,
    answer_poll,
    begin_poll,
    describe_health,
    has_news,
    take_again,
    write_bodies,
)
from slime_plugins.rollout_buffer.server.write_batcher import WriteBatcher
from slime_plugins.rollout_buffer.server.wsgi_bridge import Reply, call, environ_of, with_body
from slime_plugins.rollout_buffer.state.item_writes import Refusal

OWN_ROUTES = {
    "/buffer/write": ("POST",),
    "/jobs/{job_id}/buffer/write": ("POST",),
    "/get_rollout_data": ("POST",),
    "/health": ("GET", "HEAD"),
}
"""What is answered here, with its methods; everything else is Flask's."""
PUBLIC_PER_S = 500
PUBLIC_AT_ONCE = 100
"""How many requests that anybody may send a worker answers."""
DATA_THREADS = 4
MAX_HEADERS = 100
MAX_HEAD = 32 * 1024
MAX_TARGET = 8 * 1024
LINGER_S = 2.0
"""How long the rest of a body is received and dropped, so that its sender finds the reply it did not wait for."""
BODIES_AT_ONCE = 4
"""Bodies of the largest size that a worker may hold at a time."""

Result = TypeVar("Result")
Work = Callable[[], Result]

logger = logging.getLogger(__name__)


class Exchange:
    """One request and its reply."""

    def __init__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any], held: HeldBody) -> None:
        self.scope = scope
        self.receive = receive
        self.held = held
        self.environ = environ_of(scope)
        self.is_begun = False
        """The reply's head was sent."""
        self.connection: RequestState = Unlimited()
        self._send = send
        self._body_is_here = not self._header("content-length") and not self._header("transfer-encoding")
        self.written_job = _written_job(self.environ["REQUEST_METHOD"], self.environ["PATH_INFO"])
        """The job whose address items are posted to; None for any other request."""

    @property
    def name(self) -> str:
        """Method and path, for logs and errors."""
        return f"{self.environ['REQUEST_METHOD']} {self.environ['PATH_INFO']}"

    @property
    def declared_size(self) -> int | None:
        """The body's size, when its head says it."""
        size = self._header("content-length")
        return int(size) if size.isdigit() else 0 if self._body_is_here else None

    def _header(self, header: str) -> str:
        wanted = header.encode()
        return next((value.decode("latin-1") for name, value in self.scope["headers"] if name == wanted), "")

    async def read_body(self, most: int) -> bytes:
        """Returns the body; raises as ``request_bodies.read_body`` does."""
        if self._body_is_here:
            return b""
        if (self.declared_size or 0) > most:
            raise RequestEntityTooLarge
        self.connection.wait_for_body()
        body = await read_body(self.receive, most, self.held)
        self._body_is_here = True
        self.connection.body_is_here()
        return body

    async def send_all(self, status: int, headers: Iterable[tuple[bytes, bytes]], content: bytes) -> None:
        """Sends a reply that is here whole; what is left of the body is received first, or the connection closed."""
        closes = self._header("upgrade") != "" or not await self._discard_small_body()
        await self._begin(status, _with_size(status, headers, len(content)), closes=closes)
        if self._body_is_here:
            await self._send_body(content, more=False)
            return
        await self._send_body(content, more=True)
        self.connection.wait_for_body()
        await drain(self.receive, LINGER_S)
        await self._send_body(b"", more=False)

    async def send_pieces(
        self,
        status: int,
        headers: Iterable[tuple[bytes, bytes]],
        first: bytes,
        next_piece: Callable[[], Awaitable[Any]],
    ) -> None:
        """Sends a reply whose pieces are made one ahead of the one that the client reads."""
        await self._begin(status, headers, closes=self._header("upgrade") != "")
        piece: bytes | None = first
        while piece is not None:
            following = asyncio.ensure_future(next_piece())
            try:
                await self._send_body(piece, more=True)
            finally:
                piece = await following
        await self._send_body(b"", more=False)

    async def _discard_small_body(self) -> bool:
        """Returns whether the whole body is here, or was small enough to be received and dropped."""
        is_small = (self.declared_size or SMALL_BODY + 1) <= SMALL_BODY
        if not self._body_is_here and not self._header("expect") and is_small:
            self.connection.wait_for_body()
            self._body_is_here = await drain(self.receive, LINGER_S)
            self.connection.body_is_here()
        return self._body_is_here

    async def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, closes: bool) -> None:
        self.is_begun = True
        close = [(b"connection", b"close")] if closes else []
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *close]})

    async def _send_body(self, content: bytes, *, more: bool) -> None:
        if self.connection.is_lost:
            raise ClientGoneError
        await self._send({"type": "http.response.body", "body": content, "more_body": more})


class Application:
    """The buffer over HTTP, as ASGI has it. Every worker process has one."""

    def __init__(self, flask: Flask) -> None:
        """``flask`` has all routes but those that ``_routes`` names."""
        self.flask = flask
        self.context: ServerContext = flask.extensions["rollout_buffer"]
        settings = self.context.settings
        self.connections = ConnectionLimits(affordable(settings.max_connections))
        self._wsgi = flask.wsgi_app
        self._flask_threads = ThreadPoolExecutor(settings.threads + 1, thread_name_prefix="flask")
        self._flask_places = asyncio.Semaphore(settings.threads)
        self._large_body_place = asyncio.Semaphore(1)
        self._data_threads = ThreadPoolExecutor(DATA_THREADS, thread_name_prefix="data")
        self._health_thread = ThreadPoolExecutor(1, thread_name_prefix="health")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._large_write_thread = ThreadPoolExecutor(1, thread_name_prefix="large writes")
        keep = partial(write_bodies, self.context)
        self._writes: WriteBatcher[WriteBody, Answer] = WriteBatcher(keep, self._write_thread)
        self._large_writes: WriteBatcher[WriteBody, Answer] = WriteBatcher(keep, self._large_write_thread)
        self._polls = PollWatcher(self.context.buffer.store.data_version)
        self._public_limiter = RateLimiter(PUBLIC_PER_S, PUBLIC_AT_ONCE)
        self._budget = BodyBudget(BODIES_AT_ONCE * settings.max_body_bytes)
        self._routes = {"/buffer/write": self._write, "/get_rollout_data": self._poll, "/health": self._health}

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Answers one request."""
        exchange = Exchange(scope, receive, send, HeldBody(self._budget))
        connection = self.connections.of(scope["client"])
        if connection is not None:
            exchange.connection = connection
        exchange.connection.begin_request()
        try:
            await self._answer(exchange)
        except ClientGoneError:
            pass
        finally:
            exchange.held.release()
            exchange.connection.end_request()

    def stop(self) -> None:
        """Answers polls that wait: the server stops."""
        self._polls.stop()

    def close(self) -> None:
        """Ends its threads, and closes the store."""
        self._polls.close()
        for pool in (
            self._flask_threads,
            self._data_threads,
            self._health_thread,
            self._write_thread,
            self._large_write_thread,
        ):
            pool.shutdown(wait=True)
        self.context.buffer.store.close()

    # --- answering ---------------------------------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._route(exchange)
        except ClientGoneError:
            raise
        except asyncio.CancelledError as error:  # the server stops, and has waited for this as long as it waits
            if exchange.is_begun:
                exchange.connection.cut_off()
                raise ClientGoneError from error
            stopped = UnavailableError("the server stops before this was answered: send it again")
            await self._send(exchange, error_answer(self.context, exchange.name, stopped))
        except Exception as error:
            if exchange.is_begun:
                _log_broken_reply(exchange, error)
                exchange.connection.cut_off()
                raise ClientGoneError from error
            if not exchange.connection.is_known:
                await self._public_limiter.acquire(exchange.connection)
            answer = error_answer(self.context, exchange.name, error)
            await self._note_refusal(exchange, answer)
            await self._send(exchange, answer)

    async def _note_refusal(self, exchange: Exchange, answer: Answer) -> None:
        """Lets a job say that writes to it are refused unread: now and then, since anybody may send one."""
        told = wire.decode_error(answer.content) if isinstance(answer.content, bytes) else None
        if exchange.written_job is None or answer.status >= 500 or told is None:
            return
        if self.context.may_log("refused_write"):
            refusal = Refusal(exchange.written_job, 1, answer.status, *told[:2])
            await _in(self._data_threads, partial(self.context.buffer.note_refusals, [refusal]))

    async def _route(self, exchange: Exchange) -> None:
        _check_head(exchange)
        path, method = exchange.environ["PATH_INFO"], exchange.environ["REQUEST_METHOD"]
        may_ask = check_request(self.context, exchange.environ)
        if is_open(path) and (self.context.token is None or not may_ask):
            await self._public_limiter.acquire(exchange.connection)
        if may_ask and self.context.token is not None:
            exchange.connection.prove()
        route = self._write if exchange.written_job is not None else self._routes.get(path, self._flask)
        if path in OWN_ROUTES and method not in OWN_ROUTES[path]:
            raise MethodNotAllowed(OWN_ROUTES[path])
        body = await self._read_body(exchange, may_ask=may_ask)
        if may_ask:
            exchange.connection.prove()
        await route(exchange, body)

    async def _read_body(self, exchange: Exchange, *, may_ask: bool) -> bytes:
        limit, max_body_bytes = body_limit(exchange.environ["PATH_INFO"]), self.context.settings.max_body_bytes
        try:
            return await exchange.read_body(limit.within(max_body_bytes) if may_ask else SMALL_BODY)
        except RequestEntityTooLarge as error:
            if may_ask:
                raise limit.error(max_body_bytes) from error
            raise UnauthorizedError(f"a body of more than {SMALL_BODY} bytes needs the token in its head") from error

    async def _write(self, exchange: Exchange, body: bytes) -> None:
        writes = self._large_writes if len(body) > LARGE_BODY else self._writes
        await self._send(exchange, await writes.write(WriteBody(body, exchange.written_job)))

    async def _health(self, exchange: Exchange, _body: bytes) -> None:
        await self._send(exchange, await _in(self._health_thread, partial(describe_health, self.context)))

    async def _poll(self, exchange: Exchange, body: bytes) -> None:
        poll = await _in(self._data_threads, partial(begin_poll, self.context, body))
        if poll.may_wait and self._polls.has_room():
            poll = await _unless_gone(exchange.receive, self._wait_for_groups(poll))
        await self._send(exchange, await _in(self._data_threads, partial(answer_poll, self.context, poll)))

    async def _wait_for_groups(self, poll: Poll) -> Poll:
        loop = asyncio.get_running_loop()
        until = loop.time() + poll.payload.wait_s
        look = partial(has_news, self.context, poll)
        while poll.may_wait and await self._polls.wait(look, until - loop.time()):
            poll = await _in(self._data_threads, partial(take_again, self.context, poll))
        return poll

    async def _flask(self, exchange: Exchange, body: bytes) -> None:
        async with self._large_body_place if len(body) > LARGE_BODY else self._flask_places:
            if exchange.connection.is_lost:
                raise ClientGoneError
            environ = with_body(exchange.environ, body)
            reply: Reply = await _in(self._flask_threads, partial(call, self._wsgi, environ))
        await self._send_content(exchange, reply.status, reply.headers, reply.content)

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _send(self, exchange: Exchange, answer: Answer) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        content = answer.content if isinstance(answer.content, bytes) else _joined(answer.content)
        await self._send_content(exchange, answer.status, headers, content)

    async def _send_content(
        self,
        exchange: Exchange,
        status: int,
        headers: list[tuple[bytes, bytes]],
        content: bytes | Generator[bytes, None, None],
    ) -> None:
        if isinstance(content, bytes):
            await exchange.send_all(status, headers, content)
            return
        try:
            if exchange.scope["http_version"] == "1.0":  # knows no chunks
                await exchange.send_all(status, headers, await _in(self._data_threads, partial(b"".join, content)))
                return
            next_piece = partial(_in, self._data_threads, partial(next, content, None))
            await exchange.send_pieces(status, headers, await next_piece() or b"", next_piece)
        finally:
            await _in(self._data_threads, content.close)


def create_application(settings: ServeSettings) -> Application:
    """Builds the application; every worker process calls it once."""
    return Application(create_app(settings))


def create_application_from_environment() -> Application:
    """What gunicorn calls: reads the settings that the supervisor put into the environment, as JSON."""
    return create_application(ServeSettings.model_validate_json(os.environ[SETTINGS_VARIABLE]))


def _written_job(method: str, path: str) -> str | None:
    """Returns the job of ``POST /jobs/ID/buffer/write``; of any other request None."""
    prefix, suffix = "/jobs/", "/buffer/write"
    if method != "POST" or not path.startswith(prefix) or not path.endswith(suffix):
        return None
    return path[len(prefix) : -len(suffix)].encode("latin-1").decode("utf-8", "replace") or None


def _check_head(exchange: Exchange) -> None:
    headers = exchange.scope["headers"]
    if len(exchange.scope["raw_path"]) + len(exchange.scope["query_string"]) > MAX_TARGET:
        raise RequestURITooLarge
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEAD:
        raise RequestHeaderFieldsTooLarge


async def _in(pool: ThreadPoolExecutor, work: Work[Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


async def _unless_gone(receive: Callable[[], Awaitable[Any]], work: Any) -> Any:
    """Returns what comes of the work; stops it when the client goes away."""
    gone, task = asyncio.ensure_future(_until_gone(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (gone, task):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_size(status: int, headers: Iterable[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    given = list(headers)
    if status in (204, 304) or any(name == b"content-length" for name, _ in given):
        return given
    return [*given, (b"content-length", str(size).encode())]


def _joined(parts: Iterable[Part]) -> Generator[bytes, None, None]:
    for part in parts:
        yield b"".join(part)


def _log_broken_reply(exchange: Exchange, error: Exception) -> None:
    if isinstance(error, RolloutBufferError | HTTPException):
        logger.warning("%s: the reply was cut off: %s", exchange.name, error)
    else:
        logger.error("%s: the reply was cut off", exchange.name, exc_info=error)
