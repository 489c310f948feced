"""The gateway's routes: OpenAI's and Anthropic's ``/v1`` for agents, ``/sessions`` for the programs that run agents.

An answer is stored before it is sent. If it could not be sent, its turn answers a repetition of the request; without a
repetition it is not trained. When a client disconnects during a turn, the engine's request is aborted and nothing is
stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import NotFoundError, RolloutBufferError, UnauthorizedError, UnavailableError
from slime_plugins.rollout_buffer.gateway.chat_requests import read_chat_body
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, Piece, model_list, status_of
from slime_plugins.rollout_buffer.gateway.dialects.dialect import Dialect, dialect_of
from slime_plugins.rollout_buffer.gateway.remote_rollout_adapter import RemoteRolloutAdapter
from slime_plugins.rollout_buffer.gateway.scoring import Scorer
from slime_plugins.rollout_buffer.gateway.service import MODEL_NAME, Answer, Gateway, TurnRequest
from slime_plugins.rollout_buffer.gateway.session_bodies import AbandonBody, CloseBody, OpenBody
from slime_plugins.rollout_buffer.gateway.sessions import Session, SessionKeys
from slime_plugins.rollout_buffer.gateway.settings import KEEP_ALIVE_INTERVAL_S
from slime_plugins.rollout_buffer.http_auth import bearer_of, check_bearer, check_page, has_bearer
from slime_plugins.rollout_buffer.http_serving import read_body
from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.recording.messages import read_conversation
from slime_plugins.rollout_buffer.serve_settings import read_token
from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire.inline_images import extract_images
from slime_plugins.rollout_buffer.wire.request_fields import MAX_NESTING, parse

BUSY_RETRY_S = "1"
"""Value of the header Retry-After in errors that may pass."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which the clients of OpenAI and Anthropic count the retries of a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GATEWAY: Final = web.AppKey("gateway", Gateway)
KEYS: Final = web.AppKey("keys", SessionKeys)
TOKEN: Final = web.AppKey("token", str)
SCORER: Final = web.AppKey("scorer", Scorer)
REMOTE_ROLLOUT: Final = web.AppKey("remote_rollout", RemoteRolloutAdapter)

logger = logging.getLogger(__name__)


def create_app(gateway: Gateway, keys: SessionKeys) -> web.Application:
    """Builds the application, which starts and stops the gateway."""
    settings = gateway.settings
    app = web.Application(client_max_size=settings.max_body_bytes, middlewares=[_answer_errors])
    app[GATEWAY], app[KEYS] = gateway, keys
    app[TOKEN] = "" if settings.token_file is None else read_token(settings.token_file)
    app[SCORER] = Scorer(settings.scoring_hosts, settings.scoring_timeout_s)
    post = partial(app.router.add_post, expect_handler=_send_continue)
    # aiohttp compares a request with the routes in the order in which they were added: those of turns are the first.
    for base in ("/v1", "/sessions/{session}/v1", "/sessions/{session}"):
        post(f"{base}/chat/completions", _turn)
        post(f"{base}/responses", _turn)
        post(f"{base}/messages", _turn)
        post(f"{base}/messages/count_tokens", _count_tokens)
        app.router.add_get(f"{base}/models", _models)
    app.router.add_get("/health", _health)
    post("/sessions", _open)
    app.router.add_get("/sessions/{session}", _show)
    post("/sessions/{session}/close", _close)
    post("/sessions/{session}/abandon", _abandon)
    app[REMOTE_ROLLOUT] = RemoteRolloutAdapter(gateway, app[TOKEN])
    app[REMOTE_ROLLOUT].mount(app)
    app.cleanup_ctx.append(_run_gateway)
    return app


async def _run_gateway(app: web.Application) -> AsyncIterator[None]:
    await app[GATEWAY].start()
    yield
    await app[GATEWAY].stop()
    await app[SCORER].close()


async def _send_continue(request: web.Request) -> None:
    """Lets a client that waits for the status 100 send its body; other expectations are ignored, as HTTP allows."""
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


# --- errors ----------------------------------------------------------------------------------------------------------


def _check_browser(request: web.Request) -> None:
    """Refuses cross-site requests of browsers if the gateway has no token."""
    settings = request.app[GATEWAY].settings
    if not request.app[TOKEN]:
        public = urlsplit(settings.public_url or "").hostname
        check_page(request.headers, [*settings.allowed_hosts, *([public] if public else [])])


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        _check_browser(request)
        return await handler(request)
    except RolloutBufferError as error:
        return _error_reply(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        not_found = NotFoundError(f"there is no {request.method} {request.path[:300]} here; see docs/proxy.md")
        reply = _error_reply(request, not_found)
        reply.set_status(error.status)
        return reply
    except asyncio.CancelledError:
        raise  # the client disconnected, or the server stops
    except Exception as error:
        if isinstance(error, ConnectionError) and _is_gone(request):
            return _error_reply(request, UnavailableError("the client disconnected"))  # no client reads it
        # A defect fails one request and is logged.
        logger.exception("%s %s failed", request.method, request.path)
        return _error_reply(request, RolloutBufferError("internal error; the gateway's log has the traceback"))


def _error_reply(request: web.Request, error: RolloutBufferError) -> web.Response:
    """Encodes an error in the dialect of the route; on ``/sessions``, as the buffer's server does."""
    status = status_of(error)
    headers = {"Retry-After": BUSY_RETRY_S} if status in (429, 503, 507) else {}
    dialect = dialect_of(request.path)
    if dialect is not None:
        return _json(dialect.error(error), status, headers)
    return _json(wire.encode_error(error.code, error.message, error.detail), status, headers)


# --- authentication --------------------------------------------------------------------------------------------------


def _sent_key(request: web.Request) -> str:
    """Returns the key of a request: its bearer token, or the header ``x-api-key`` of Anthropic's clients."""
    return bearer_of(request.headers.get("Authorization")) or request.headers.get("x-api-key", "")


def _has_token(request: web.Request) -> bool:
    """Returns True if the bearer is the gateway's token, or if the gateway has none."""
    token = request.app[TOKEN]
    return not token or has_bearer(request.headers.get("Authorization"), token)


def _named_session(request: web.Request) -> str:
    """Returns the id of the session that a request names and may use.

    A path with the session's key suffices. If the gateway has a token, a path with the session's id also needs the
    session's key, or that token as bearer. Without a session in the path, the key must be sent.
    """
    keys = request.app[KEYS]
    id_or_key = request.match_info.get("session")
    if id_or_key is None:
        return keys.verify(_sent_key(request))
    if id_or_key.startswith("sk-"):  # a key, perhaps a wrong one; ids begin with a number
        return keys.verify(id_or_key)
    if not _has_token(request) and keys.verify(_sent_key(request)) != id_or_key:
        raise UnauthorizedError("the api_key is of another session")
    return id_or_key


# --- sessions --------------------------------------------------------------------------------------------------------


async def _open(request: web.Request) -> web.Response:
    check_bearer(request.headers.get("Authorization"), request.app[TOKEN])
    body = parse(OpenBody, await _object(request))
    gateway = request.app[GATEWAY]
    session = await gateway.open(body)
    key = request.app[KEYS].key_of(session.uid)
    url = (gateway.settings.public_url or str(request.url.origin())).rstrip("/")
    session_url = f"{url}/sessions/{key}"
    access = {"api_key": key, "base_url": f"{session_url}/v1", "openai_base_url": f"{url}/v1"}
    return _json({**gateway.describe(session), **access, "anthropic_base_url": session_url, "model": MODEL_NAME})


async def _show(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    session = await gateway.registry.session(_named_session(request))
    return _json(gateway.describe(session))


async def _close(request: web.Request) -> web.Response:
    session_id = _named_session(request)
    body = parse(CloseBody, await _object(request))
    return _json(await request.app[GATEWAY].close(session_id, body, request.app[SCORER].score))


async def _abandon(request: web.Request) -> web.Response:
    session_id = _named_session(request)
    body = parse(AbandonBody, await _object(request))
    return _json(await request.app[GATEWAY].abandon(session_id, body.reason))


async def _health(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    return _json({"status": "ok", "sessions": await gateway.call_store(gateway.claims.count_open)})


# --- agents ----------------------------------------------------------------------------------------------------------


async def _models(request: web.Request) -> web.Response:
    if request.match_info.get("session") is None and not _has_token(request):
        request.app[KEYS].verify(_sent_key(request))
    return _json(model_list(MODEL_NAME))


@dataclass(frozen=True, kw_only=True, slots=True)
class _DialectRequest:
    """A request for a turn; ``body`` is its body before conversion to a chat request."""

    dialect: Dialect
    body: Mapping[str, Any]
    turn: TurnRequest


async def _read_turn(request: web.Request, body: Mapping[str, Any], images: Mapping[str, Image]) -> _DialectRequest:
    dialect = dialect_of(request.path)
    assert dialect is not None
    gateway = request.app[GATEWAY]
    session = await gateway.registry.session(_named_session(request))
    previous = dialect.previous_turn(body)
    history = [] if previous is None else await gateway.messages_of_previous_turn(session, *previous)
    chat, images_of_dialect = dialect.read(body, history)
    turn = TurnRequest(
        session=session,
        body=read_chat_body(chat, dialect.client_names),
        conversation=read_conversation(chat.get("messages")),
        images={**images, **images_of_dialect},
        is_retry=request.headers.get(RETRY_COUNT, "0") != "0",
    )
    return _DialectRequest(dialect=dialect, body=body, turn=turn)


async def _turn(request: web.Request) -> web.StreamResponse:
    content, images = extract_images(await _content(request))
    body = json_object(content, max_nesting=MAX_NESTING)
    if body.get("rollout_id") is not None and request.path == "/v1/chat/completions":
        return await request.app[REMOTE_ROLLOUT].answer(request, body)  # a turn of the remote rollout protocol
    dialect_request = await _read_turn(request, body, images)
    if dialect_request.turn.body.stream:
        return await _streamed(request, dialect_request)
    answer = await request.app[GATEWAY].chat(dialect_request.turn)
    with _sending(request, dialect_request.turn.session, answer):
        response = _json(dialect_request.dialect.encode(answer.reply, dialect_request.body))
        await response.prepare(request)
        await response.write_eof()
    return response


async def _count_tokens(request: web.Request) -> web.Response:
    content, images = extract_images(await _content(request))
    dialect_request = await _read_turn(request, json_object(content, max_nesting=MAX_NESTING), images)
    return _json({"input_tokens": await request.app[GATEWAY].count_tokens(dialect_request.turn)})


async def _streamed(request: web.Request, dialect_request: _DialectRequest) -> web.StreamResponse:
    """Answers with server-sent events while the turn is sampled; the last events go out once the turn is stored."""
    response, events = _EventStream(request), dialect_request.dialect.events(dialect_request.body)
    events_to_send: asyncio.Queue[bytes] = asyncio.Queue()

    def emit(part: ChatReply | Piece) -> None:
        events_to_send.put_nowait(b"".join(events.begin(part) if isinstance(part, ChatReply) else events.add(part)))

    task = asyncio.create_task(request.app[GATEWAY].chat(dialect_request.turn, emit))
    task.add_done_callback(lambda _: events_to_send.put_nowait(b""))  # wakes the loop below
    try:
        while not (task.done() and events_to_send.empty()):
            await response.send(await _next_events(events_to_send))
        answer = task.result()
    except RolloutBufferError as error:
        if not response.begun:
            raise
        await response.send(*events.fail(error))
        return await response.end()
    except BaseException:  # also when the client disconnects
        task.cancel()
        if task.done() and not task.cancelled() and task.exception() is None:  # the turn is stored, but was not sent
            request.app[GATEWAY].registry.note_sent(dialect_request.turn.session, task.result().turn, sent=False)
        raise
    with _sending(request, dialect_request.turn.session, answer):
        await response.send(*events.end(answer.reply))
        return await response.end()


async def _next_events(events_to_send: asyncio.Queue[bytes]) -> bytes:
    """Returns all waiting events; a keep-alive comment if none comes within ``KEEP_ALIVE_INTERVAL_S``."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_INTERVAL_S):
            events = [await events_to_send.get()]
    except TimeoutError:
        return b": the turn is being sampled\n\n"
    while not events_to_send.empty():
        events.append(events_to_send.get_nowait())
    return b"".join(events)


class _EventStream:
    """A response of server-sent events, whose head is sent with the first event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response = web.StreamResponse(headers=headers)

    @property
    def begun(self) -> bool:
        """True once the status has been sent."""
        return self._response.prepared

    async def send(self, *events: bytes) -> None:
        content = b"".join(events)
        if content:
            await self._response.prepare(self._request)
            await self._response.write(content)

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


@contextlib.contextmanager
def _sending(request: web.Request, session: Session, answer: Answer) -> Iterator[None]:
    """Records whether the block sent the answer: it did unless it raised, or the client is gone at its end.

    Raises:
        ConnectionResetError: the client has disconnected.
    """
    sent = False
    try:
        yield
        if _is_gone(request):
            raise ConnectionResetError("the client disconnected")
        sent = True
    finally:
        request.app[GATEWAY].registry.note_sent(session, answer.turn, sent=sent)


# --- reading and writing ---------------------------------------------------------------------------------------------


def _is_gone(request: web.Request) -> bool:
    """Returns True if the client has disconnected."""
    return request.transport is None or request.transport.is_closing()


async def _content(request: web.Request) -> bytes:
    return await read_body(request, request.app[GATEWAY].settings.body_timeout_s)


async def _object(request: web.Request) -> dict[str, Any]:
    return json_object(await _content(request), max_nesting=MAX_NESTING)


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    content = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=content, status=status, content_type="application/json", headers=dict(headers or {}))
