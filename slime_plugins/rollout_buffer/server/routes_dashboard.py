"""The dashboard: its page and files, signing in, and the JSON that the page asks for again and again.

The files are plain HTML, CSS and ES modules and hold no data. The page may load nothing from elsewhere and run nothing
that is not one of these files: whatever a model wrote stays text.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import NotFoundError, UnauthorizedError
from slime_plugins.rollout_buffer.protocol import request_models
from slime_plugins.rollout_buffer.protocol.auth import SESSION_LENGTH_S, cookie_name, is_token, issue_session
from slime_plugins.rollout_buffer.protocol.query_params import (
    GroupPageQuery,
    NamedTrajectoryQuery,
    OverviewQuery,
    SeriesQuery,
    TokenRowQuery,
)
from slime_plugins.rollout_buffer.protocol.request_models import SignInPayload
from slime_plugins.rollout_buffer.reporting.mismatch import describe_trainer_row, trainer_rows_of
from slime_plugins.rollout_buffer.reporting.token_rows import describe_rows
from slime_plugins.rollout_buffer.reporting.turn_tree import describe_turn_tree, emission_order
from slime_plugins.rollout_buffer.server.http import (
    as_json,
    json_reply,
    read_body,
    the_context,
    the_inspection,
)

FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

routes = Blueprint("rollout_buffer_dashboard", __name__)


# --- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@functools.cache
def _files() -> dict[str, _File]:
    """Every file of the dashboard by its path; nothing else can be asked for."""
    found = {}
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            name = path.relative_to(FOLDER).as_posix()
            found[name] = _File(content, MEDIA_TYPES[path.suffix], _digest(content))
    return found


@routes.get("/")
def dashboard() -> Response:
    """Returns the dashboard's page; it shows the sign-in form when the server asks for a token."""
    return _send("index.html")


@routes.get("/dashboard/<path:file>")
def dashboard_file(file: str) -> Response:
    """Returns one of the files that the page is made of."""
    return _send(file)


def _send(name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise NotFoundError(f"the dashboard has no file {name[:200]!r}")
    response = Response(file.content, content_type=file.media_type)
    response.headers.update(SECURITY_HEADERS)
    return _revalidated(response, file.etag)


def _revalidated(response: Response, etag: str) -> Response:
    """Lets a browser keep the reply and ask each time whether it still holds."""
    response.set_etag(etag)
    response.headers["Cache-Control"] = "private, no-cache"
    response.make_conditional(request)
    return response


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


# --- signing in ------------------------------------------------------------------------------------------------------


@routes.post("/sign_in")
def sign_in() -> Response:
    """Gives a browser that knows the token a cookie that stands for it."""
    payload = request_models.parse(SignInPayload, read_body())
    token = the_context().token
    if token is None:
        return json_reply({"signed_in": True})
    if not is_token(payload.token, token):
        raise UnauthorizedError("that is not this server's token")
    response = json_reply({"signed_in": True})
    response.set_cookie(
        cookie_name(token),
        issue_session(token, time.time()),
        max_age=SESSION_LENGTH_S,
        secure=request.is_secure,
        httponly=True,
        samesite="Strict",
    )
    return response


@routes.post("/sign_out")
def sign_out() -> Response:
    """Takes the cookie away again."""
    response = json_reply({"signed_in": False})
    if (token := the_context().token) is not None:
        response.delete_cookie(cookie_name(token), httponly=True, samesite="Strict")
    return response


# --- what the page asks for ------------------------------------------------------------------------------------------


@routes.get("/overview")
def overview() -> Response:
    """Returns how the buffer is, and a page of jobs with why each moves or stands still."""
    page = request_models.parse(OverviewQuery, request.args.to_dict())
    return json_reply({**the_context().views.overview(page), "needs_token": the_context().token is not None})


@routes.get("/jobs/<id:job_id>/explanation")
def explanation(job_id: str) -> Response:
    """Says in words why a job stands still and what to do, or that it moves."""
    return json_reply(the_context().views.explanation(job_id))


@routes.get("/jobs/<id:job_id>/series")
def series(job_id: str) -> Response:
    """Returns what happened to a job over time, in buckets."""
    query = request_models.parse(SeriesQuery, request.args.to_dict())
    return json_reply(the_context().views.series(job_id, query))


@routes.get("/jobs/<id:job_id>/groups")
def groups(job_id: str) -> Response:
    """Lists a job's groups, the last touched first."""
    page = request_models.parse(GroupPageQuery, request.args.to_dict())
    return _json_or_unchanged(the_context().views.groups(job_id, page))


@routes.get("/groups/<int:group_index>")
def group(group_index: int) -> Response:
    """Returns one group with its members, its attempts and what was delivered."""
    if group_index >= 2**63:
        raise NotFoundError(f"there is no group {str(group_index)[:40]}")
    return _json_or_unchanged(the_context().views.group(group_index))


@routes.get("/token_rows/<id:uid>")
def token_rows(uid: str) -> Response:
    """Returns how a trajectory's generations became training rows, and the tokens of one row."""
    query = request_models.parse(TokenRowQuery, request.args.to_dict())
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    generations = wire.decode_generations(orjson.loads(found.body).get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    described = describe_rows(generations, query.row, tokenizer)
    report = trainer_rows_of(context.buffer.store, found.light["job_id"], uid).get(query.row)
    return _json_or_unchanged(
        {
            "uid": uid,
            "job_id": found.light["job_id"],
            **described,
            "why_no_texts": why_no_texts,
            "trainer": None if report is None else describe_trainer_row(report),
        }
    )


@routes.get("/turn_tree/<id:uid>")
def turn_tree(uid: str) -> Response:
    """Returns the turns of a trajectory as a tree, each with what its prompt added and what was sampled."""
    query = request_models.parse(NamedTrajectoryQuery, request.args.to_dict())
    context = the_context()
    found = the_inspection().trajectory(uid, query.job_id)
    body = orjson.loads(found.body)
    generations = wire.decode_generations(body.get("generations"))
    settings = context.buffer.job(found.light["job_id"]).settings
    tokenizer, why_no_texts = context.token_texts.tokenizer(settings.tokenizer_path) if generations else (None, "")
    turns = describe_turn_tree(generations, emission_order(body.get("extra_info")), tokenizer)
    return _json_or_unchanged(
        {"uid": uid, "job_id": found.light["job_id"], "turns": turns, "why_no_texts": why_no_texts}
    )


@routes.get("/neighbours/<id:uid>")
def neighbours(uid: str) -> Response:
    """Returns the uids of the trajectories that were written to the job just before and just after one."""
    query = request_models.parse(NamedTrajectoryQuery, request.args.to_dict())
    return json_reply(the_inspection().neighbours(uid, query.job_id))


def _json_or_unchanged(body: Any) -> Response:
    content = as_json(body)
    return _revalidated(Response(content, mimetype="application/json"), _digest(content))
