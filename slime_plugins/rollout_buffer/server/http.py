"""What all routes share: the context of a process, checks of requests, bodies, replies, and errors as replies.

Files of routes import from here and never from each other.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from flask import Response, current_app, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing import PathConverter

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import (
    PayloadTooLargeError,
    RolloutBufferError,
    UnavailableError,
    UnsupportedEncodingError,
)
from slime_plugins.rollout_buffer.http_auth import check_access, check_host
from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.observability.liveness import supervisors_heartbeat
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.text_search import TextSearch
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings, read_token
from slime_plugins.rollout_buffer.storage.store import Store

RETRY_AFTER_S = 2
"""``Retry-After`` of replies with status 503 or 507."""
LOG_INTERVAL_S = 5.0
"""Minimum seconds between two log lines for one error code."""

LARGE_BODY = 2 * 1024 * 1024
"""A larger body is parsed in a thread of its own."""
MAX_BYTES_READ_FOR_TEXTS = 64 * 1024 * 1024
"""In a larger body, brackets inside texts are counted as lists: to exclude them may hold the GIL for 2 s."""
MAX_COMMAS = 10_000_000
"""Largest number of commas in a body: each may separate elements of a list, which take 80 bytes each once parsed."""
MAX_OBJECTS = 2_000_000
"""Largest number of lists and objects in a body: parsing each holds the GIL as long as 20 bytes of other JSON."""

Part = Sequence[bytes | memoryview]
"""A part of a long reply, as pieces in order."""

logger = logging.getLogger(__name__)


class IdConverter(PathConverter):
    """An id in a path: any characters, slashes included."""

    regex = ".+?"
    part_isolating = False


class ServerContext:
    """The state of one process: settings, buffer, read-only views, token."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.buffer = Buffer(Store(settings.data_dir, max_bytes=settings.max_data_bytes))
        self.inspection = Inspection(self.buffer.store)
        self.text_search = TextSearch(self.inspection)
        self.supervisor = supervisors_heartbeat()
        self.views = Views(self.buffer.store, SUPERVISOR.name)
        self.token = read_token(settings.token_file) if settings.token_file is not None else None
        self._logged_at: dict[str, float] = {}

    def may_log(self, code: str) -> bool:
        """Returns True at most once per ``LOG_INTERVAL_S`` and code: on a full disk every write fails."""
        now = time.monotonic()
        if now - self._logged_at.get(code, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            return False
        self._logged_at[code] = now
        return True


def the_context() -> ServerContext:
    context: ServerContext = current_app.extensions["rollout_buffer"]
    return context


def the_buffer() -> Buffer:
    return the_context().buffer


def the_inspection() -> Inspection:
    return the_context().inspection


def check_request(context: ServerContext, environ: Mapping[str, Any]) -> bool:
    """Checks host, authentication and encoding of a request; returns the result of ``check_access``.

    Raises:
        UnauthorizedError: neither the token nor a valid session cookie is present.
        ForbiddenError: a page of another site made a browser send it.
        UnsupportedEncodingError: its body is compressed.
    """
    if context.token is None:
        check_host(environ.get("HTTP_HOST"), context.settings.allowed_hosts)
    may_ask = check_access(environ, context.token, time.time())
    encoding = environ.get("HTTP_CONTENT_ENCODING", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedEncodingError(f"the body is encoded as {encoding[:80]}: send it uncompressed")
    return may_ask


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON reply; the content of a long reply is an iterator of parts."""

    content: bytes | Iterator[Part]
    status: int = 200

    @property
    def headers(self) -> list[tuple[str, str]]:
        """All headers but the content length."""
        retry = [("Retry-After", str(RETRY_AFTER_S))] if self.status in (503, 507) else []
        return [("Content-Type", "application/json"), *retry]


def error_answer(context: ServerContext, what: str, error: Exception) -> Answer:
    """Encodes an error: a sentence and a code; tracebacks are only logged.

    ``what`` is the request's method and path.
    """
    if isinstance(error, RolloutBufferError):
        if error.http_status >= 500 and context.may_log(error.code):
            logger.warning("%s: %s", what, error.message)
        return _error(error.http_status, error.code, error.message, error.detail)
    if isinstance(error, MemoryError):
        logger.error("%s: the server is out of memory", what, exc_info=error)
        return error_answer(context, what, UnavailableError("the server is out of memory: send it again later"))
    if isinstance(error, HTTPException):
        code = (error.name or "error").lower().replace(" ", "_")
        return _error(error.code or 500, code, _http_message(what, error))
    logger.error("%s failed", what, exc_info=error)
    return _error(500, "internal", "internal error; the server's log has the traceback")


def _error(status: int, code: str, message: str, detail: Mapping[str, Any] | None = None) -> Answer:
    return Answer(as_json(wire.encode_error(code, message, detail)), status)


def _http_message(what: str, error: HTTPException) -> str:
    method, path = what.split(" ", 1)
    if error.code == 404:
        return f"there is no {path[:300]} here; see docs/http_api.md for the routes"
    if error.code == 405:
        return f"{path[:300]} does not take {method}"
    return error.description or error.name


def as_json(body: Any) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


# --- requests and replies of Flask's routes --------------------------------------------------------------------------


def check_before_route() -> None:
    """Checks each request; see ``check_request``. ``asgi`` has checked it, too, before it received the body."""
    check_request(the_context(), request.environ)


def as_response(answer: Answer) -> Response:
    """Converts an answer into a Flask response."""
    content = answer.content if isinstance(answer.content, bytes) else map(b"".join, answer.content)
    return Response(content, status=answer.status, headers=answer.headers)


def error_reply(error: Exception) -> Response:
    """Handles all errors of the routes."""
    return as_response(error_answer(the_context(), f"{request.method} {request.path}", error))


def json_reply(body: Any, status: int = 200) -> Response:
    """Answers with JSON."""
    return as_response(Answer(as_json(body), status))


def json_or_unchanged(body: Any) -> Response:
    """Answers with JSON, or 304 if the browser's copy is the same."""
    return revalidated(json_reply(body))


def revalidated(response: Response) -> Response:
    """Lets the browser cache a reply that it revalidates by its ETag before each use."""
    response.add_etag()
    response.headers["Cache-Control"] = "private, no-cache"
    response.make_conditional(request)
    return response


def read_body(*, with_nan: bool = False) -> dict[str, Any]:
    """Parses a JSON object; an empty body is an empty object. ``with_nan`` accepts NaN and Infinity."""
    return json_object(read_bytes(), with_nan=with_nan)


def read_bytes() -> bytes:
    """Returns the body, which the middleware has received whole."""
    return request.get_data(cache=False)


_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def refuse_too_many_objects(content: bytes | bytearray, what: str) -> None:
    """Refuses JSON text that would block the process for seconds while it is parsed.

    Raises:
        PayloadTooLargeError: it has more than ``MAX_OBJECTS`` lists and objects, or ``MAX_COMMAS`` commas.
    """
    if len(content) <= MAX_OBJECTS:
        return  # each list, object and comma is at least one byte
    objects = _count_brackets(content)
    if objects > MAX_OBJECTS and len(content) < MAX_BYTES_READ_FOR_TEXTS:
        objects -= sum(_count_brackets(text[0]) for text in _TEXT.finditer(content))  # formulas are full of brackets
    if objects > MAX_OBJECTS:
        raise PayloadTooLargeError(f"{what} has more than {MAX_OBJECTS} lists and objects: send less at once")
    if content.count(b",") > MAX_COMMAS:
        raise PayloadTooLargeError(f"{what} has more than {MAX_COMMAS} commas: send less at once")


def _count_brackets(content: bytes | bytearray) -> int:
    return content.count(b"[") + content.count(b"{")
