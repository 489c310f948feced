"""HTTP over the store: the Flask application factory, its routes, and the one place where errors become replies.

The server holds no state of its own, so several gunicorn workers are as good as one. Routes read what came, call the
``Buffer``, and write what it said; nothing here decides anything. Imports no generator, no device and no engine.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from flask import Blueprint, Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException

from slime_plugins.rollout_buffer import inputs, payloads, wire
from slime_plugins.rollout_buffer.buffer import Buffer, Delivery
from slime_plugins.rollout_buffer.config import ServeSettings, read_token
from slime_plugins.rollout_buffer.errors import (
    InvalidPayloadError,
    NotFoundError,
    PayloadTooLargeError,
    RolloutBufferError,
    UnauthorizedError,
    UnavailableError,
    UnknownTaskTypeError,
)
from slime_plugins.rollout_buffer.payloads import AckPayload, PollPayload, StartPayload
from slime_plugins.rollout_buffer.store import Store
from slime_plugins.rollout_buffer.tables import JobRecord
from slime_plugins.rollout_buffer.types import Instance

__all__ = ["create_app", "create_app_from_environment"]

SETTINGS_VARIABLE = "ROLLOUT_BUFFER_SERVE_SETTINGS"
SUPERVISOR = "supervisor"
HEARTBEAT_PATIENCE_S = 15.0
WAIT_STEP_S = 0.01
POLL_NOTE_INTERVAL_S = 5.0
OPEN_ROUTES = frozenset({"/health"})

logger = logging.getLogger(__name__)
routes = Blueprint("rollout_buffer", __name__)


class ServerContext:
    """What every request of one process needs: settings, the buffer, the token, and places for waiting polls."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.buffer = Buffer(Store(settings.data_dir))
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


def create_app(settings: ServeSettings) -> Flask:
    """Builds the application; every gunicorn worker calls it once."""
    app = Flask("rollout_buffer")
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes
    app.extensions["rollout_buffer"] = ServerContext(settings)
    app.register_blueprint(routes)
    app.register_error_handler(Exception, _error_reply)
    return app


def create_app_from_environment() -> Flask:
    """What gunicorn calls: reads the settings file that the supervisor named in the environment."""
    path = Path(os.environ[SETTINGS_VARIABLE])
    return create_app(ServeSettings.model_validate_json(path.read_bytes()))


def _context() -> ServerContext:
    context: ServerContext = current_app.extensions["rollout_buffer"]
    return context


def _buffer() -> Buffer:
    return _context().buffer


# --- every request ---------------------------------------------------------------------------------------------------


@routes.before_request
def _check_token() -> None:
    token = _context().token
    if token is None or request.path in OPEN_ROUTES:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise UnauthorizedError("send the header Authorization: Bearer TOKEN (clients read ROLLOUT_BUFFER_TOKEN)")


def _error_reply(error: Exception) -> Response:
    """The one error handler: a sentence and a code for the caller, a traceback only in the log."""
    if isinstance(error, RolloutBufferError):
        if error.http_status >= 500:
            logger.warning("%s %s: %s", request.method, request.path, error.message)
        body = {"code": error.code, "message": error.message, "detail": error.detail}
        return _json({"error": body}, error.http_status)
    if isinstance(error, HTTPException):
        code = PayloadTooLargeError.code if error.code == 413 else (error.name or "error").lower().replace(" ", "_")
        message = _http_message(error)
        return _json({"error": {"code": code, "message": message, "detail": {}}}, error.code or 500)
    logger.exception("%s %s failed", request.method, request.path)
    message = "the server has a defect; its log has the traceback"
    return _json({"error": {"code": "internal", "message": message, "detail": {}}}, 500)


def _http_message(error: HTTPException) -> str:
    if error.code == 413:
        limit = _context().settings.max_body_bytes
        return f"the body is larger than {limit} bytes: write fewer items at once, or raise --max-body-bytes"
    if error.code == 404:
        return f"there is no {request.path} here; see docs/http_api.md for the routes"
    if error.code == 405:
        return f"{request.path} does not take {request.method}"
    return error.description or error.name


def _json(body: Any, status: int = 200) -> Response:
    content = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    return Response(content, status=status, mimetype="application/json")


def _body() -> dict[str, Any]:
    """Reads a JSON object; an empty body counts as an empty object."""
    content = request.get_data(cache=False)
    if not content.strip():
        return {}
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidPayloadError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidPayloadError("the body must be a JSON object")
    return body


# --- starting --------------------------------------------------------------------------------------------------------


@routes.post("/start_rollout")
def start_rollout() -> Response:
    """Starts a job, or attaches to it when it is there already."""
    body = _body()
    _check_task_type(body.get("task_type"))
    payload = payloads.parse(StartPayload, body)
    _check_tokenizer(payload)
    started = _buffer().start_job(payload, _instances(payload))
    job = started.job
    return _json(
        {
            "message": started.message,
            "job_id": job.job_id,
            "state": job.state.value,
            "attached": started.attached,
            "groups": job.instance_count * job.num_epoch,
            "group_size": job.group_size,
        }
    )


def _check_task_type(task_type: Any) -> None:
    """Accepts only work that somebody will do: a supervisor lives, and knows the task type."""
    beat = _buffer().heartbeat(SUPERVISOR)
    if beat is None or beat[0] > HEARTBEAT_PATIENCE_S:
        raise UnavailableError(
            "the supervisor does not answer: nobody would play this job. Is rollout-buffer serve up?"
        )
    known = beat[1].get("task_types", {})
    if not isinstance(task_type, str) or task_type in known:
        return  # what is not even a string is the payload's own error
    broken = beat[1].get("broken_generators", {})
    hint = f"; broken generators: {broken}" if broken else ""
    names = ", ".join(sorted(known))
    raise UnknownTaskTypeError(
        f"no generator has task_type {task_type[:100]!r}; known: {names}{hint}",
        {"task_types": sorted(known), "broken_generators": broken},
    )


def _check_tokenizer(payload: StartPayload) -> None:
    path = payload.tokenizer_path
    if path is not None and path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise InvalidPayloadError(
            f"tokenizer_path {path} is not a folder on the buffer host: put the trainer's tokenizer there"
        )


def _instances(payload: StartPayload) -> list[Instance]:
    if payload.instances is not None:
        return inputs.instances_from_lines(payload.instances)
    if payload.input_file is not None:
        return inputs.read_instances(payload.input_file, _context().settings.resolved_data_roots())
    return []


# --- delivery --------------------------------------------------------------------------------------------------------


@routes.post("/get_rollout_data")
def get_rollout_data() -> Response:
    """Hands out finished groups, waiting for some when asked to."""
    poll = payloads.parse(PollPayload, _body())
    buffer = _buffer()
    acknowledged = buffer.acknowledge(poll.ack) if poll.ack else None
    job = buffer.resolve_job(poll.job_id)
    if job is None:
        return _nothing(None, "no job is open", acknowledged)
    if time.time() - (job.last_poll_at or 0.0) > POLL_NOTE_INTERVAL_S:
        buffer.polled(job)
    delivery = buffer.take(job, poll)
    if delivery is None and poll.wait_s > 0:
        delivery = _wait_for_groups(job, poll)
    if delivery is None:
        return _nothing(job, "nothing is ready yet", acknowledged)
    return Response(_reply_chunks(buffer, delivery, poll, acknowledged), mimetype="application/json")


def _wait_for_groups(job: JobRecord, poll: PollPayload) -> Delivery | None:
    """Watches the database for commits of others; takes when a group is ready, or gives up at ``wait_s``."""
    context = _context()
    with context.place_to_wait() as may_wait:
        if not may_wait:
            return None
        deadline = time.monotonic() + poll.wait_s
        seen = None
        while time.monotonic() < deadline:
            version = context.buffer.store.data_version()
            if version != seen:
                seen = version
                if context.buffer.has_news(job, poll) and (delivery := context.buffer.take(job, poll)) is not None:
                    return delivery
                if context.buffer.is_over(job):
                    return None
            time.sleep(WAIT_STEP_S)
    return None


def _nothing(job: JobRecord | None, message: str, acknowledged: Any) -> Response:
    meta_info = _buffer().empty_meta_info(job)
    if acknowledged is not None:
        meta_info["acknowledged"] = acknowledged
    return _json({"success": False, "message": message, "data": {"data": [], "meta_info": meta_info}})


def _reply_chunks(buffer: Buffer, delivery: Delivery, poll: PollPayload, acknowledged: Any) -> Iterator[bytes]:
    """Writes the reply item by item: stored payloads go out as they are, never parsed and never all at once."""
    meta_info = dict(delivery.meta_info)
    if acknowledged is not None:
        meta_info["acknowledged"] = acknowledged
    head = orjson.dumps({"success": True, "message": "groups delivered"})[:-1]
    yield head + b',"data":{"meta_info":' + orjson.dumps(meta_info) + b',"data":['
    separator = b""
    for light, body in buffer.delivered_items(delivery):
        if poll.images == "inline":
            body = _with_inline_images(buffer, body)
        yield separator + orjson.dumps(light)[:-1] + b"," + body[1:]
        separator = b","
    yield b"]}}"


def _with_inline_images(buffer: Buffer, body: bytes) -> bytes:
    """Puts the screenshots that a payload names by hash into it, for clients that know only data URIs."""
    for sha256 in wire.image_hashes(body):
        path = buffer.store.image_path(sha256)
        if path.is_file():
            body = wire.inline_image(body, sha256, path.read_bytes())
    return body


@routes.post("/ack")
def ack() -> Response:
    """Counts deliveries as received."""
    payload = payloads.parse(AckPayload, _body())
    result = _buffer().acknowledge(payload.all_ids)
    if result["unknown"] and not result["acked"] and not result["expired"]:
        raise NotFoundError(f"there is no delivery {result['unknown'][0]!r}", result)
    return _json(result)


# --- writing ---------------------------------------------------------------------------------------------------------


@routes.post("/buffer/write")
def write() -> Response:
    """Takes finished items from any generator anywhere: one item, or a list under ``items``."""
    body = _body()
    job_id = body.pop("job_id", None)
    if job_id is not None:
        job_id = wire.identifier(job_id, "job_id")
    entries = body.get("items", [body])
    if not isinstance(entries, list) or not entries:
        raise InvalidPayloadError("items must be a list of at least one item")
    items = [
        wire.decode_written_item(entry, where="item" if len(entries) == 1 else f"items[{at}]")
        for at, entry in enumerate(entries)
    ]
    job, results = _buffer().write_items(job_id, items)
    return _json(
        {
            "success": True,
            "message": "written",
            "job_id": job.job_id,
            "results": [{"uid": result.uid, "status": result.status} for result in results],
        }
    )


# --- looking ---------------------------------------------------------------------------------------------------------


@routes.get("/images/<sha256>")
def get_image(sha256: str) -> Response:
    """Returns a screenshot: exactly the bytes that the engine received."""
    path = _buffer().store.image_path(sha256) if wire.is_sha256(sha256) else None
    if path is None or not path.is_file():
        raise NotFoundError(f"there is no image {sha256[:80]!r}")
    data = path.read_bytes()
    response = Response(data, mimetype=wire.image_media_type(data) or "application/octet-stream")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


@routes.get("/jobs")
def jobs() -> Response:
    """Lists the jobs, newest first."""
    buffer = _buffer()
    return _json({"jobs": [buffer.describe(job) for job in buffer.jobs()]})


@routes.get("/jobs/<path:job_id>")
def job(job_id: str) -> Response:
    """Returns one job with its progress and accounting."""
    buffer = _buffer()
    return _json(buffer.describe(buffer.job(job_id)))


@routes.post("/jobs/<path:job_id>/<any(cancel, pause, resume):verb>")
def change_job(job_id: str, verb: str) -> Response:
    """Cancels, pauses or resumes a job."""
    buffer = _buffer()
    return _json(buffer.describe(buffer.change_job(job_id, verb)))


@routes.get("/health")
def health() -> Response:
    """Says whether the server can read its store and whether a supervisor lives. Needs no token and tells no secret."""
    beat = _buffer().heartbeat(SUPERVISOR)
    alive = beat is not None and beat[0] <= HEARTBEAT_PATIENCE_S
    report = {
        "status": "ok" if alive else "degraded",
        "supervisor": "alive" if alive else "not seen",
        "task_types": sorted(beat[1].get("task_types", {})) if beat is not None and alive else [],
    }
    return _json(report, 200 if alive else 503)
