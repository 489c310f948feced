"""The two routes that carry the data: items in, finished groups out. They do not need Flask.

Nearly all requests of a training run are one of these two, and what Flask does around a request takes as long as what
the buffer does with a small one. What is here blocks, and is called in threads; ``server/asgi.py`` receives, waits and
sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, PayloadTooLargeError, RequestError
from slime_plugins.rollout_buffer.protocol import request_models
from slime_plugins.rollout_buffer.protocol.inline_images import extract_images
from slime_plugins.rollout_buffer.protocol.request_models import PollPayload
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.server.http import (
    Answer,
    ServerContext,
    as_json,
    error_answer,
    json_object,
    of_one_go,
)
from slime_plugins.rollout_buffer.server.supervisor_state import read_supervisor_state
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.item_writes import Refusal, Write, WriteResult, Written
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord

POLL_NOTE_INTERVAL_S = 5.0


# --- items in --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnreadWrite:
    """A body that no items can be read from, and the job that it is for, as far as that was read."""

    job_id: str | None
    error: Exception


@dataclass(frozen=True, slots=True)
class WriteBody:
    """The body of a request that brings items, and the job that the request's path names."""

    content: bytes
    job_id: str | None = None
    read: Write | UnreadWrite | None = None
    """What it wants written, where that was read before it came to the thread that writes."""

    def __len__(self) -> int:
        return len(self.content)


def write_bodies(context: ServerContext, bodies: Sequence[WriteBody]) -> list[Answer]:
    """Keeps what several requests bring, with one fsync for all of them; one that cannot be kept fails alone."""
    writes = [body.read or read_write(body) for body in bodies]
    kept = iter(context.buffer.write_together([write for write in writes if isinstance(write, Write)]))
    answers, refusals = [], []
    for write in writes:
        result = next(kept) if isinstance(write, Write) else write.error
        answers.append(_answer(context, result))
        if isinstance(result, RequestError):
            items = len(write.items) if isinstance(write, Write) else 1
            refusals.append(Refusal(write.job_id, items, result.http_status, result.code, result.message))
    if refusals:
        context.buffer.note_refusals(refusals)
    return answers


def _answer(context: ServerContext, result: Written | Exception) -> Answer:
    if isinstance(result, Exception):
        return error_answer(context, "POST /buffer/write", result)
    return _written(*result)


def read_write(body: WriteBody) -> Write | UnreadWrite:
    """Reads what a body wants written: one item, or a list under ``items``."""
    job_id = body.job_id
    try:
        text, images = extract_images(body.content)
        wanted = json_object(of_one_go(text, "the body without its screenshots"))
        job_id = wanted.pop("job_id", None) or job_id
        if job_id is not None:
            job_id = wire.identifier(job_id, "job_id")
        entries = _entries(wanted)
        items = [
            wire.decode_written_item(entry, where="item" if len(entries) == 1 else f"items[{at}]", images=images)
            for at, entry in enumerate(entries)
        ]
    except Exception as error:  # noqa: BLE001 - it is the answer to this one write
        return UnreadWrite(job_id if isinstance(job_id, str) else None, error)
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
    if len(entries) > wire.MAX_ITEMS:
        raise PayloadTooLargeError(f"one write takes up to {wire.MAX_ITEMS} items: send {len(entries)} in several")
    return entries


# --- groups out ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """A poll and what was found for it so far."""

    payload: PollPayload
    job: JobRecord | None
    acknowledged: Any = None
    delivery: Delivery | None = None
    attended: bool = False
    """A supervisor lived when it began: once there is none, the server is about to stop."""

    @property
    def may_wait(self) -> bool:
        """Returns True if something may still come that it asks for."""
        return self.delivery is None and self.job is not None and self.payload.wait_s > 0


def begin_poll(context: ServerContext, content: bytes) -> Poll:
    """Acknowledges what a poll names, and takes what is ready."""
    payload = request_models.parse(PollPayload, json_object(content))
    buffer = context.buffer
    acknowledged = buffer.acknowledge(payload.ack) if payload.ack else None
    job = buffer.resolve_job(payload.job_id)
    if job is None:
        return Poll(payload=payload, job=None, acknowledged=acknowledged)
    if buffer.store.clock() - (job.last_poll_at or 0.0) > POLL_NOTE_INTERVAL_S:
        buffer.polled(job)
    delivery = buffer.take(job, payload)
    if delivery is None:
        buffer.empty_poll(job)
    attended = buffer.heartbeat(SUPERVISOR.name) is not None
    return Poll(payload=payload, job=job, acknowledged=acknowledged, delivery=delivery, attended=attended)


def has_news(context: ServerContext, poll: Poll) -> bool | None:
    """Returns True if a waiting poll should take now; False when waiting has become pointless, None when neither."""
    assert poll.job is not None
    buffer = context.buffer
    if buffer.has_news(poll.job, poll.payload):
        return True
    if buffer.is_over(poll.job) or (poll.attended and buffer.heartbeat(SUPERVISOR.name) is None):
        return False
    return None


def take_again(context: ServerContext, poll: Poll) -> Poll:
    """Takes what has become ready; somebody else may have been quicker."""
    assert poll.job is not None
    return replace(poll, delivery=context.buffer.take(poll.job, poll.payload))


def answer_poll(context: ServerContext, poll: Poll) -> Answer:
    """Answers a poll with what was found for it."""
    if poll.delivery is not None:
        return Answer(delivery_chunks(context.buffer, poll.delivery, poll.payload, poll.acknowledged))
    meta_info = context.buffer.empty_meta_info(poll.job)
    message = _nothing_open(context) if poll.job is None else "nothing is ready yet"
    if cause := meta_info.get("job_cause"):
        message = f"nothing is ready, and job {meta_info['job_id']} is {meta_info['job_state']}: {cause}"
    if poll.acknowledged is not None:
        meta_info["acknowledged"] = poll.acknowledged
    return Answer(as_json({"success": False, "message": message, "data": {"data": [], "meta_info": meta_info}}))


def _nothing_open(context: ServerContext) -> str:
    last = context.buffer.last_job()
    ending = (
        f"; the last, {last.job_id}, is {last.state.value}: {last.cause}" if last is not None and last.cause else ""
    )
    return f"no job is open{ending}"


# --- how the server is -----------------------------------------------------------------------------------------------


def describe_health(context: ServerContext) -> Answer:
    """Says whether the store can be read and written and a supervisor lives. Needs no token and tells no secret."""
    seen = read_supervisor_state(context)
    report = {
        "status": "ok" if seen.reason is None else "degraded",
        "reason": seen.reason,
        "supervisor": "alive" if seen.alive else "not seen",
        "task_types": sorted(seen.catalog.get("task_types", {})) if seen.alive else [],
        "extensions": seen.catalog.get("extensions", []) if seen.alive else [],
    }
    return Answer(as_json(report), 200 if seen.serving else 503)
