"""What all routes share: the context of a process, the token, reading bodies, writing replies, errors as replies.

Route files (``server``, ``server_inspect`` …) import from here and never from each other.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from flask import Response, current_app, request
from werkzeug.exceptions import ClientDisconnected, HTTPException, RequestEntityTooLarge
from werkzeug.routing import PathConverter

from slime_plugins.rollout_buffer.buffer import Buffer, Delivery
from slime_plugins.rollout_buffer.config import ServeSettings, read_token
from slime_plugins.rollout_buffer.errors import (
    InvalidPayloadError,
    PayloadTooLargeError,
    RolloutBufferError,
    UnauthorizedError,
    UnreadableBodyError,
    UnsupportedEncodingError,
)
from slime_plugins.rollout_buffer.http_worker import RECEIVE_ERRORS, grant_time, receive_body, stop_clock
from slime_plugins.rollout_buffer.inline_images import take_out
from slime_plugins.rollout_buffer.inspection import Inspection
from slime_plugins.rollout_buffer.payloads import PollPayload
from slime_plugins.rollout_buffer.store import Store
from slime_plugins.rollout_buffer.types import Image

__all__ = [
    "SUPERVISOR",
    "IdConverter",
    "ServerContext",
    "check_encoding",
    "check_token",
    "delivery_chunks",
    "error_reply",
    "json_reply",
    "read_body",
    "read_body_and_images",
    "read_bytes",
    "the_buffer",
    "the_context",
    "the_inspection",
    "with_inline_images",
]

SUPERVISOR = "supervisor"
"""The name under which the supervisor's heartbeat is stored."""

DIRECT_BODY_BYTES = 16 * 1024
CHUNK_BYTES = 256 * 1024
"""A reply goes out in about such chunks: large ones would be copied through memory that no cache holds."""
OPEN_ROUTES = frozenset({"/health"})

logger = logging.getLogger(__name__)


class IdConverter(PathConverter):
    """An id in a path: anything, slashes included, also at its start."""

    regex = ".+?"
    part_isolating = False


class ServerContext:
    """What every request of one process needs: settings, the buffer, views of it, the token, places to wait."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.buffer = Buffer(Store(settings.data_dir, max_bytes=settings.max_data_bytes))
        self.inspection = Inspection(self.buffer.store)
        self.token = read_token(settings.token_file) if settings.token_file is not None else None
        self._waiting = threading.BoundedSemaphore(max(1, settings.threads // 2))

    @contextmanager
    def place_to_wait(self) -> Iterator[bool]:
        """Gives one of the places for waiting polls; False when all are taken, so that other routes stay answered."""
        taken = self._waiting.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._waiting.release()


def the_context() -> ServerContext:
    """Returns the context of this process."""
    context: ServerContext = current_app.extensions["rollout_buffer"]
    return context


def the_buffer() -> Buffer:
    """Returns the buffer of this process."""
    return the_context().buffer


def the_inspection() -> Inspection:
    """Returns the read-only views of this process."""
    return the_context().inspection


def check_token() -> None:
    """Lets a request pass that carries the token, when the server has one.

    Raises:
        UnauthorizedError: it does not.
    """
    token = the_context().token
    if token is None or request.path in OPEN_ROUTES:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode()):
        raise UnauthorizedError("send the header Authorization: Bearer TOKEN (clients read ROLLOUT_BUFFER_TOKEN)")


def check_encoding() -> None:
    """Lets a request pass whose body is as it is.

    Raises:
        UnsupportedEncodingError: it is compressed.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedEncodingError(f"the body is encoded as {encoding[:80]}: send it uncompressed")


def error_reply(error: Exception) -> Response:
    """The one error handler: a sentence and a code for the caller, a traceback only in the log."""
    if isinstance(error, RolloutBufferError):
        if error.http_status >= 500:
            logger.warning("%s %s: %s", request.method, request.path, error.message)
        body = {"code": error.code, "message": error.message, "detail": error.detail}
        return json_reply({"error": body}, error.http_status)
    if isinstance(error, HTTPException):
        code = PayloadTooLargeError.code if error.code == 413 else (error.name or "error").lower().replace(" ", "_")
        message = _http_message(error)
        return json_reply({"error": {"code": code, "message": message, "detail": {}}}, error.code or 500)
    logger.exception("%s %s failed", request.method, request.path)
    message = "the server has a defect; its log has the traceback"
    return json_reply({"error": {"code": "internal", "message": message, "detail": {}}}, 500)


def _http_message(error: HTTPException) -> str:
    if error.code == 413:
        limit = the_context().settings.max_body_bytes
        return f"the body is larger than {limit} bytes: write fewer items at once, or raise --max-body-bytes"
    if error.code == 404:
        return f"there is no {request.path[:300]} here; see docs/http_api.md for the routes"
    if error.code == 405:
        return f"{request.path[:300]} does not take {request.method}"
    return error.description or error.name


def json_reply(body: Any, status: int = 200) -> Response:
    """Answers with JSON."""
    content = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    return Response(content, status=status, mimetype="application/json")


def read_body() -> dict[str, Any]:
    """Reads a JSON object; an empty body counts as an empty object."""
    return _json_object(read_bytes())


def read_body_and_images() -> tuple[dict[str, Any], dict[str, Image]]:
    """Reads a JSON object whose inline screenshots are named by hash now; returns it and the screenshots by hash."""
    content, images = take_out(*_raw_body())
    return _json_object(content), images


def _raw_body() -> tuple[bytes | bytearray, int]:
    """Returns a buffer and how much of it is the body; a large body comes without being copied about."""
    size = request.content_length or 0
    if DIRECT_BODY_BYTES <= size <= the_context().settings.max_body_bytes:
        with _arriving(size):
            received = receive_body(request.environ, size)
        if received is not None:
            return received
    content = read_bytes()
    return content, len(content)


def read_bytes() -> bytes:
    """Returns the body as it came.

    Raises:
        UnreadableBodyError: it did not come whole, or not in time.
        RequestEntityTooLarge: it is larger than the server takes.
    """
    limit = the_context().settings.max_body_bytes
    with _arriving(request.content_length):
        content = request.get_data(cache=False)
        # A body of unknown length is silently cut at the limit: is there more?
        if request.content_length is None and len(content) >= limit and request.environ["wsgi.input"].read(1):
            raise RequestEntityTooLarge
    return content


@contextmanager
def _arriving(size: int | None) -> Iterator[None]:
    """Gives a body the time that its size deserves."""
    grant_time(request.environ, size)
    try:
        yield
    except (*RECEIVE_ERRORS, ClientDisconnected) as error:
        raise UnreadableBodyError(f"the body did not come whole and in time: {error}; send it again") from error
    finally:
        stop_clock(request.environ)


def _json_object(content: bytes) -> dict[str, Any]:
    if not content.strip():
        return {}
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidPayloadError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidPayloadError("the body must be a JSON object")
    return body


def delivery_chunks(buffer: Buffer, delivery: Delivery, poll: PollPayload, acknowledged: Any) -> Iterator[bytes]:
    """Writes the reply item by item: stored payloads go out as they are, never parsed and never all at once."""
    meta_info = dict(delivery.meta_info)
    if acknowledged is not None:
        meta_info["acknowledged"] = acknowledged
    head = orjson.dumps({"success": True, "message": "groups delivered"})[:-1]
    pieces: list[bytes | memoryview] = [head, b',"data":{"meta_info":', orjson.dumps(meta_info), b',"data":[']
    separator, size = b"", 0
    for light, body in buffer.delivered_pieces(delivery, inline_images=poll.images == "inline"):
        item: list[bytes | memoryview] = [separator, orjson.dumps(light)[:-1], b",", memoryview(body[0])[1:], *body[1:]]
        for piece in item:
            pieces.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
        separator = b","
    yield b"".join([*pieces, b"]}}"])


def with_inline_images(buffer: Buffer, body: bytes) -> bytes:
    """Puts the screenshots that a payload names by hash into it, for clients that know only data URIs."""
    return b"".join(buffer.contents.inlined(body))
