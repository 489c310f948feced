"""``POST /buffer/write``: stores items.

These functions block; ``asgi`` calls them in threads, without Flask, which would double the time of a small request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, PayloadTooLargeError, RequestError
from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.server.http import (
    Answer,
    ServerContext,
    as_json,
    error_answer,
    refuse_too_many_objects,
)
from slime_plugins.rollout_buffer.state.item_writes import Refusal, Write, Written
from slime_plugins.rollout_buffer.wire.delivery_replies import WriteReply
from slime_plugins.rollout_buffer.wire.inline_images import extract_images
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item

MAX_WRITE_BYTES = 32 * 1024 * 1024
"""Limit of a write without its screenshots."""
_WITHOUT_IMAGES = "the body without its screenshots"


@dataclass(frozen=True, slots=True)
class UnreadWrite:
    """A body that cannot be parsed, and its job if that is known."""

    job_id: str | None
    error: Exception


@dataclass(frozen=True, slots=True)
class WriteBody:
    """The body of a write, and the job of its path."""

    content: bytes
    job_id: str | None = None
    read: Write | UnreadWrite | None = None
    """The parsed body, if a thread has parsed it already."""

    def __len__(self) -> int:
        return len(self.content)


def write_bodies(context: ServerContext, bodies: Sequence[WriteBody]) -> list[Answer]:
    """Stores several requests with one fsync; a request that cannot be stored fails alone."""
    writes = [body.read or read_write(body) for body in bodies]
    stored = iter(context.buffer.write_together([write for write in writes if isinstance(write, Write)]))
    answers, refusals = [], []
    for write in writes:
        result = next(stored) if isinstance(write, Write) else write.error
        answers.append(_answer(context, result))
        if isinstance(result, RequestError):
            item_count = len(write.items) if isinstance(write, Write) else 1
            refusals.append(Refusal(write.job_id, item_count, result.http_status, result.code, result.message))
    if refusals:
        context.buffer.note_refusals(refusals)
    return answers


def _answer(context: ServerContext, result: Written | Exception) -> Answer:
    if isinstance(result, Exception):
        return error_answer(context, "POST /buffer/write", result)
    job, results = result
    return Answer(as_json(WriteReply(success=True, message="written", job_id=job.job_id, results=results)))


def read_write(body: WriteBody) -> Write | UnreadWrite:
    """Parses a body: one item, or a list under ``items``."""
    job_id = body.job_id
    try:
        text, images = extract_images(body.content)
        if len(text) > MAX_WRITE_BYTES:
            raise PayloadTooLargeError(f"{_WITHOUT_IMAGES} is larger than {MAX_WRITE_BYTES} bytes: send less at once")
        refuse_too_many_objects(text, _WITHOUT_IMAGES)
        fields = json_object(text)
        job_id = fields.pop("job_id", None) or job_id
        if job_id is not None:
            job_id = wire.identifier(job_id, "job_id")
        entries = _entries(fields)
        items = [
            decode_written_item(entry, where="item" if len(entries) == 1 else f"items[{index}]", images=images)
            for index, entry in enumerate(entries)
        ]
    except Exception as error:  # noqa: BLE001 - any error is the reply to this one write
        return UnreadWrite(job_id if isinstance(job_id, str) else None, error)
    return Write(job_id, items)


def _entries(body: dict[str, Any]) -> list[Any]:
    entries = body.get("items", [body])
    if not isinstance(entries, list) or not entries:
        raise InvalidPayloadError("items must be a list of at least one item")
    if len(entries) > wire.MAX_ITEMS:
        raise PayloadTooLargeError(f"one write takes up to {wire.MAX_ITEMS} items: send {len(entries)} in several")
    return entries
