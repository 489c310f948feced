"""The two routes that carry the data: items in, finished groups out. They do not need Flask.

Nearly all requests of a training run are one of these two, and what Flask does around a request takes as long as what
the buffer does with a small one. Plain writes come through the worker's lane (``write_lane.py``) to ``TakeTogether``,
several at a time. ``ShortWay`` stands in front of the application and takes polls, and the writes that were not for the
lane; anything else, and anything unusual, goes on to Flask, which calls the same functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from werkzeug.exceptions import RequestEntityTooLarge

from slime_plugins.rollout_buffer import payloads, wire
from slime_plugins.rollout_buffer.buffer import Delivery
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, PayloadTooLargeError
from slime_plugins.rollout_buffer.http_worker import send_pieces
from slime_plugins.rollout_buffer.inline_images import take_out
from slime_plugins.rollout_buffer.item_writer import Write, WriteResult
from slime_plugins.rollout_buffer.payloads import PollPayload
from slime_plugins.rollout_buffer.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.web import (
    SUPERVISOR,
    Answer,
    ServerContext,
    as_json,
    check_request,
    delivery_chunks,
    error_answer,
    json_object,
    receive,
)
from slime_plugins.rollout_buffer.write_lane import Arrived, Reply

__all__ = ["ShortWay", "TakeTogether", "give_data", "take_items"]

WAIT_STEP_S = 0.01
POLL_NOTE_INTERVAL_S = 5.0

Environ = dict[str, Any]
Application = Callable[..., Iterable[bytes]]
Route = Callable[[ServerContext, bytes | bytearray, int], Answer]


# --- items in --------------------------------------------------------------------------------------------------------


def take_items(context: ServerContext, content: bytes | bytearray, size: int) -> Answer:
    """Keeps finished items from any generator anywhere: one item, or a list under ``items``.

    The first ``size`` bytes of ``content`` are the request's body.
    """
    write = _wanted(content, size)
    return _written(*context.buffer.write_items(write.job_id, write.items))


class TakeTogether:
    """Keeps what several requests bring, with one fsync for all of them; one that cannot be kept fails alone."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def __call__(self, arrived: Sequence[Arrived]) -> list[Reply]:
        """Returns a reply for each request."""
        writes = [self._read(request) for request in arrived]
        kept = iter(self._context.buffer.write_together([write for write in writes if isinstance(write, Write)]))
        return [self._reply(next(kept) if isinstance(write, Write) else write) for write in writes]

    def _read(self, request: Arrived) -> Write | Exception:
        try:
            if request.size > self._context.settings.max_body_bytes:
                raise RequestEntityTooLarge
            check_request(self._context, request.environ)
            return _wanted(request.content, request.start + request.size, request.start)
        except Exception as error:  # noqa: BLE001 - as in ``ShortWay``
            return error

    def _reply(self, kept: tuple[JobRecord, list[WriteResult]] | Exception) -> Reply:
        answer = (
            error_answer(self._context, "POST /buffer/write", kept) if isinstance(kept, Exception) else _written(*kept)
        )
        assert isinstance(answer.content, bytes)
        return Reply(f"{answer.status} {HTTPStatus(answer.status).phrase}", answer.content)


def _wanted(content: bytes | bytearray, end: int, start: int = 0) -> Write:
    """Reads what a body, from ``start`` to ``end`` of ``content``, wants written."""
    text, images = take_out(content, end, start)
    body = json_object(text)
    job_id = body.pop("job_id", None)
    if job_id is not None:
        job_id = wire.identifier(job_id, "job_id")
    entries = _entries(body)
    items = [
        wire.decode_written_item(entry, where="item" if len(entries) == 1 else f"items[{at}]", images=images)
        for at, entry in enumerate(entries)
    ]
    return Write(job_id, items)


def _written(job: JobRecord, results: Sequence[WriteResult]) -> Answer:
    reply = {
        "success": True,
        "message": "written",
        "job_id": job.job_id,
        "results": [{"uid": result.uid, "status": result.status} for result in results],
    }
    return Answer(as_json(reply))


def _entries(body: dict[str, Any]) -> list[Any]:
    entries = body.get("items", [body])
    if not isinstance(entries, list) or not entries:
        raise InvalidPayloadError("items must be a list of at least one item")
    if len(entries) > payloads.MAX_ITEMS:
        raise PayloadTooLargeError(f"one write takes up to {payloads.MAX_ITEMS} items: send {len(entries)} in several")
    return entries


# --- groups out ------------------------------------------------------------------------------------------------------


def give_data(context: ServerContext, content: bytes | bytearray, size: int) -> Answer:
    """Hands out finished groups, waiting for some when asked to."""
    poll = payloads.parse(PollPayload, json_object(bytes(memoryview(content)[:size])))
    buffer = context.buffer
    acknowledged = buffer.acknowledge(poll.ack) if poll.ack else None
    job = buffer.resolve_job(poll.job_id)
    if job is None:
        return _nothing(context, None, "no job is open", acknowledged)
    if time.time() - (job.last_poll_at or 0.0) > POLL_NOTE_INTERVAL_S:
        buffer.polled(job)
    delivery = buffer.take(job, poll)
    if delivery is None:
        buffer.polled_in_vain(job)
    if delivery is None and poll.wait_s > 0:
        delivery = _wait_for_groups(context, job, poll)
    if delivery is None:
        return _nothing(context, job, "nothing is ready yet", acknowledged)
    return Answer(delivery_chunks(buffer, delivery, poll, acknowledged))


def _wait_for_groups(context: ServerContext, job: JobRecord, poll: PollPayload) -> Delivery | None:
    """Watches the database for commits of others; takes when a group is ready, or gives up at ``wait_s``."""
    with context.place_to_wait() as may_wait:
        if not may_wait:
            return None
        deadline = time.monotonic() + poll.wait_s
        attended = context.buffer.heartbeat(SUPERVISOR) is not None
        seen = None
        while time.monotonic() < deadline:
            version = context.buffer.store.data_version()
            if version != seen:
                seen = version
                if context.buffer.has_news(job, poll) and (delivery := context.buffer.take(job, poll)) is not None:
                    return delivery
                if context.buffer.is_over(job):
                    return None
                if attended and context.buffer.heartbeat(SUPERVISOR) is None:
                    return None  # the supervisor says goodbye: this server stops
            time.sleep(WAIT_STEP_S)
    return None


def _nothing(context: ServerContext, job: JobRecord | None, message: str, acknowledged: Any) -> Answer:
    meta_info = context.buffer.empty_meta_info(job)
    if acknowledged is not None:
        meta_info["acknowledged"] = acknowledged
    return Answer(as_json({"success": False, "message": message, "data": {"data": [], "meta_info": meta_info}}))


# --- the short way ---------------------------------------------------------------------------------------------------

ROUTES: Mapping[str, Route] = {"/buffer/write": take_items, "/get_rollout_data": give_data}


class ShortWay:
    """A WSGI application that answers plain POSTs to the data routes itself, and passes everything else on."""

    def __init__(self, context: ServerContext, otherwise: Application) -> None:
        self._context = context
        self._otherwise = otherwise

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request."""
        route = ROUTES.get(environ["PATH_INFO"]) if environ["REQUEST_METHOD"] == "POST" else None
        size = self._size(environ)
        if route is None or size is None:
            return self._otherwise(environ, start_response)
        try:
            check_request(self._context, environ)
            answer = route(self._context, *receive(environ, size))
        except Exception as error:  # noqa: BLE001 - every error is answered, as Flask's handler does
            answer = error_answer(self._context, f"POST {environ['PATH_INFO']}", error)
        return _send(answer, environ, start_response)

    def _size(self, environ: Environ) -> int | None:
        """The body's size; None when it is not known, or more than may be."""
        given = environ.get("CONTENT_LENGTH") or ""
        if not (given.isascii() and given.isdigit()) or "HTTP_TRANSFER_ENCODING" in environ:
            return None
        return int(given) if int(given) <= self._context.settings.max_body_bytes else None


def _send(answer: Answer, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
    headers = [("Content-Type", "application/json")]
    if isinstance(answer.content, bytes):
        headers.append(("Content-Length", str(len(answer.content))))
    start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", headers)
    return [answer.content] if isinstance(answer.content, bytes) else send_pieces(environ, answer.content)
