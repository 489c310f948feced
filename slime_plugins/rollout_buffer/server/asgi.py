"""The ASGI application that gunicorn's workers run: answers ``OWN_ROUTES`` itself, and calls Flask for all others.

The event loop receives, waits and sends; threads run what blocks. The middleware ``request_limits`` has received the
whole body before the application is called.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from flask import Flask
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import RolloutBufferError, UnauthorizedError, UnavailableError
from slime_plugins.rollout_buffer.serve_settings import SETTINGS_VARIABLE, ServeSettings
from slime_plugins.rollout_buffer.server.app import create_app
from slime_plugins.rollout_buffer.server.body_limits import body_limit
from slime_plugins.rollout_buffer.server.http import LARGE_BODY, Answer, ServerContext, check_request, error_answer
from slime_plugins.rollout_buffer.server.poll_watcher import PollWatcher
from slime_plugins.rollout_buffer.server.request_limits import (
    BodyCap,
    ClientGoneError,
    RequestLimits,
    declared_size,
    drain,
)
from slime_plugins.rollout_buffer.server.routes.health import describe_health
from slime_plugins.rollout_buffer.server.routes.poll import Poll, answer_poll, begin_poll, should_take_again, take_again
from slime_plugins.rollout_buffer.server.routes.write import WriteBody, read_write, write_bodies
from slime_plugins.rollout_buffer.server.supervisor_watchdog import start_supervisor_watchdog
from slime_plugins.rollout_buffer.server.wsgi_bridge import Reply, call, environ_of
from slime_plugins.rollout_buffer.state.item_writes import Refusal
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher

OWN_ROUTES = {
    "/buffer/write": ("POST",),
    "/jobs/{job_id}/buffer/write": ("POST",),
    "/get_rollout_data": ("POST",),
    "/health": ("GET", "HEAD"),
}
"""Routes answered without Flask, by method. Flask answers all others, also ``GET /jobs/ID/buffer/write``, where it
takes ``ID/buffer/write`` for the id of a job."""
DATA_THREADS = 4
"""Threads of a worker for polls and for the parts of long replies."""
SMALL_BODY = 64 * 1024
"""Largest body, in bytes, of a request without a token."""
BODIES_AT_ONCE = 4
"""Bodies of the largest size that a worker may hold at a time."""
SWITCH_INTERVAL_S = 0.001
"""How long the event loop waits for the GIL while a thread parses a large body; Python's default is five times this."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Parsed items are many objects without cycles; with Python's defaults garbage collection took 5 % of a write."""
MAX_FILES = 65_536
"""File descriptors of a worker, within the hard limit."""

Result = TypeVar("Result")
Work = Callable[[], Result]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Exchange:
    """A request whose body was received or refused, and the sending of its reply."""

    scope: Any
    receive: Callable[[], Awaitable[Any]]
    send: Callable[[Any], Awaitable[None]]
    is_begun: bool = False
    """True once the sending of the reply's head has begun: another reply is then impossible."""
    _gone: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Method and path, for logs and errors."""
        return f"{self.scope['method']} {self.scope['path']}"

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of ``work``; cancels it when the client disconnects.

        The task that waits for the disconnection is reused, and cancelled by ``close`` only: gunicorn takes the
        cancellation of ``receive`` for a disconnection.
        """
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._until_gone())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((self._gone, task), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            return task.result()
        finally:
            task.cancel()

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stops waiting for a disconnection."""
        if self._gone is not None:
            self._gone.cancel()

    async def begin(self, reply: Reply, *more: tuple[bytes, bytes]) -> None:
        """Sends the reply's head."""
        self.is_begun = True
        headers = [*reply.headers, *more]
        if isinstance(reply.content, bytes) and not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", str(len(reply.content)).encode()))
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})

    async def send_body(self, content: bytes, *, more: bool) -> None:
        """Sends a part of the reply's body."""
        await self.send({"type": "http.response.body", "body": content, "more_body": more})


class Application:
    """The ASGI application; one per worker process."""

    def __init__(self, flask: Flask) -> None:
        """``flask`` has all routes but ``OWN_ROUTES``."""
        self.flask = flask
        self.context: ServerContext = flask.extensions["rollout_buffer"]
        settings = self.context.settings
        self._flask_threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="flask")
        self._large_body_thread = ThreadPoolExecutor(1, thread_name_prefix="large body")
        self._data_threads = ThreadPoolExecutor(DATA_THREADS, thread_name_prefix="data")
        self._health_thread = ThreadPoolExecutor(1, thread_name_prefix="health")
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="writes")
        self._writes: WriteBatcher[WriteBody, Answer] = WriteBatcher(
            partial(write_bodies, self.context), self._write_thread
        )
        self._polls = PollWatcher(self.context.buffer.store.data_version)
        self._routes = {"/buffer/write": self._write, "/get_rollout_data": self._poll, "/health": self._health}
        self._limits = RequestLimits(
            self._answer,
            check=self._check,
            refuse=self._refuse,
            max_requests=settings.max_connections,
            max_held_bytes=BODIES_AT_ONCE * settings.max_body_bytes,
        )

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await self._limits(scope, receive, send)

    def close(self) -> None:
        """Stops the threads and closes the store."""
        self._polls.close()
        for pool in (
            self._flask_threads,
            self._large_body_thread,
            self._data_threads,
            self._health_thread,
            self._write_thread,
        ):
            pool.shutdown(wait=True)
        self.context.buffer.store.close()

    # --- around every request ----------------------------------------------------------------------------------------

    def _check(self, scope: Any) -> BodyCap:
        """Checks a request's head; returns the size limit of its body."""
        may_ask = check_request(self.context, environ_of(scope))
        if not may_ask:
            refusal = f"a body of more than {SMALL_BODY} bytes needs the token in its head"
            return BodyCap(SMALL_BODY, partial(UnauthorizedError, refusal))
        limit, max_body_bytes = body_limit(scope["path"]), self.context.settings.max_body_bytes
        return BodyCap(limit.within(max_body_bytes), partial(limit.error, max_body_bytes))

    async def _refuse(self, scope: Any, error: Exception, receive: Any, send: Any) -> None:
        """Answers a request whose body was not received whole, drops the rest, and closes the connection."""
        exchange = Exchange(scope, receive, send)
        reply = await self._error_reply(exchange, error)
        assert isinstance(reply.content, bytes)
        has_body = declared_size(scope) != 0
        await exchange.begin(reply, *([(b"connection", b"close")] if has_body else []))
        await exchange.send_body(reply.content, more=has_body)
        if has_body:
            await drain(receive)
            await exchange.send_body(b"", more=False)

    async def _answer(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            reply = await self._route(exchange, body)
            await self._send(exchange, reply)
        except ClientGoneError:
            raise
        except asyncio.CancelledError as error:  # the server is stopping
            if exchange.is_begun:
                raise ClientGoneError from error
            stopped = UnavailableError("the server is stopping: send it again")
            await self._send(exchange, _reply_of(error_answer(self.context, exchange.name, stopped)))
        except Exception as error:
            if exchange.is_begun:
                _log_broken_reply(exchange, error)
                raise ClientGoneError from error
            await self._send(exchange, await self._error_reply(exchange, error))
        finally:
            exchange.close()

    async def _error_reply(self, exchange: Exchange, error: Exception) -> Reply:
        answer = error_answer(self.context, exchange.name, error)
        await self._note_refusal(exchange, answer)
        return _reply_of(answer)

    async def _note_refusal(self, exchange: Exchange, answer: Answer) -> None:
        """Records refused writes in the job, at most every few seconds, since anonymous clients may cause them."""
        job_id = _written_job(exchange.scope)
        decoded = wire.decode_error(answer.content) if isinstance(answer.content, bytes) else None
        if job_id is None or answer.status >= 500 or decoded is None:
            return
        if self.context.may_log("refused_write"):
            refusal = Refusal(job_id, 1, answer.status, *decoded[:2])
            await _in(self._data_threads, partial(self.context.buffer.note_refusals, [refusal]))

    async def _send(self, exchange: Exchange, reply: Reply) -> None:
        """Sends a reply; each part is produced while the client reads the part before."""
        if isinstance(reply.content, bytes):
            await exchange.begin(reply)
            await exchange.send_body(reply.content, more=False)
            return
        await exchange.unless_gone(self._send_pieces(exchange, reply, reply.content))

    async def _send_pieces(self, exchange: Exchange, reply: Reply, pieces: Iterator[bytes]) -> None:
        next_piece = partial(_in, self._data_threads, partial(next, pieces, None))
        piece = await next_piece()
        await exchange.begin(reply)
        while piece is not None:
            following = asyncio.ensure_future(next_piece())
            try:
                await exchange.send_body(piece, more=True)
            finally:
                piece = await following
        await exchange.send_body(b"", more=False)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _route(self, exchange: Exchange, body: bytes) -> Reply:
        path, method = exchange.scope["path"], exchange.scope["method"]
        if path in OWN_ROUTES and method not in OWN_ROUTES[path]:
            raise MethodNotAllowed(OWN_ROUTES[path])
        if _written_job(exchange.scope) is not None:
            return _reply_of(await self._write(exchange, body))
        if path in self._routes:
            return _reply_of(await self._routes[path](exchange, body))
        threads = self._large_body_thread if len(body) > LARGE_BODY else self._flask_threads
        return await _in(threads, partial(call, self.flask, environ_of(exchange.scope), body))

    async def _write(self, exchange: Exchange, body: bytes) -> Answer:
        write = WriteBody(body, _written_job(exchange.scope))
        if len(body) > LARGE_BODY:
            write = replace(write, read=await _in(self._large_body_thread, partial(read_write, write)))
        return await self._writes.write(write)

    async def _health(self, exchange: Exchange, _body: bytes) -> Answer:
        return await _in(self._health_thread, partial(describe_health, self.context))

    async def _poll(self, exchange: Exchange, body: bytes) -> Answer:
        poll = await _in(self._data_threads, partial(begin_poll, self.context, body))
        if poll.may_wait and self._polls.has_room():
            poll = await exchange.unless_gone(self._wait_for_groups(poll))
        return await _in(self._data_threads, partial(answer_poll, self.context, poll))

    async def _wait_for_groups(self, poll: Poll) -> Poll:
        loop = asyncio.get_running_loop()
        until = loop.time() + poll.payload.wait_s
        check = partial(should_take_again, self.context, poll)
        while poll.may_wait and await self._polls.wait(check, until - loop.time()):
            poll = await _in(self._data_threads, partial(take_again, self.context, poll))
        return poll


def create_application(settings: ServeSettings) -> Application:
    """Builds the application; called once by each worker."""
    return Application(create_app(settings))


def create_application_from_environment() -> Application:
    """Builds the application from the settings in the environment; gunicorn's entry point."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < files:
        with contextlib.suppress(ValueError, OSError):  # macOS refuses more than the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    application = create_application(ServeSettings.model_validate_json(os.environ[SETTINGS_VARIABLE]))
    gc.freeze()  # the loaded modules stay
    gc.set_threshold(*GC_THRESHOLDS)
    atexit.register(application.close)
    start_supervisor_watchdog(application.context.buffer.store, application.context.settings.writer_turn_limit_s)
    return application


def _written_job(scope: Any) -> str | None:
    """Returns the job of ``POST /jobs/ID/buffer/write``; None for other requests."""
    prefix, suffix, path = "/jobs/", "/buffer/write", scope["path"]
    if scope["method"] != "POST" or not path.startswith(prefix) or not path.endswith(suffix):
        return None
    return path[len(prefix) : -len(suffix)] or None


def _reply_of(answer: Answer) -> Reply:
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
    content = answer.content if isinstance(answer.content, bytes) else map(b"".join, answer.content)
    return Reply(answer.status, headers, content)


async def _in(pool: ThreadPoolExecutor, work: Work[Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _log_broken_reply(exchange: Exchange, error: Exception) -> None:
    if isinstance(error, RolloutBufferError | HTTPException):
        logger.warning("%s: the reply was cut off: %s", exchange.name, error)
    else:
        logger.error("%s: the reply was cut off", exchange.name, exc_info=error)
