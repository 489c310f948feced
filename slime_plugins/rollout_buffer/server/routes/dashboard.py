"""The dashboard: its page and files, signing in, and the JSON that the page asks for again and again.

The files are plain HTML, CSS and ES modules and hold no data. The page may load nothing from elsewhere and run nothing
that is not one of these files: whatever a model wrote stays text.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer.errors import NotFoundError, UnauthorizedError
from slime_plugins.rollout_buffer.http_auth import SESSION_LENGTH_S, cookie_name, is_token, issue_session
from slime_plugins.rollout_buffer.server.http import (
    digest,
    json_reply,
    read_body,
    revalidated,
    the_context,
)
from slime_plugins.rollout_buffer.wire.control_requests import SignInPayload
from slime_plugins.rollout_buffer.wire.job_replies import SignedIn
from slime_plugins.rollout_buffer.wire.query_params import (
    OverviewQuery,
    SeriesQuery,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse

FOLDER = Path(__file__).resolve().parents[2] / "dashboard"
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
            found[name] = _File(content, MEDIA_TYPES[path.suffix], digest(content))
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
    return revalidated(response, file.etag)


# --- signing in ------------------------------------------------------------------------------------------------------


@routes.post("/sign_in")
def sign_in() -> Response:
    """Gives a browser that knows the token a cookie that stands for it."""
    payload = parse(SignInPayload, read_body())
    token = the_context().token
    if token is None:
        return json_reply(SignedIn(signed_in=True))
    if not is_token(payload.token, token):
        raise UnauthorizedError("that is not this server's token")
    response = json_reply(SignedIn(signed_in=True))
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
    response = json_reply(SignedIn(signed_in=False))
    if (token := the_context().token) is not None:
        response.delete_cookie(cookie_name(token), httponly=True, samesite="Strict")
    return response


# --- what the page asks for ------------------------------------------------------------------------------------------


@routes.get("/overview")
def overview() -> Response:
    """Returns how the buffer is, and a page of jobs with why each moves or stands still."""
    page = parse(OverviewQuery, request.args.to_dict())
    return json_reply(the_context().views.overview(page, needs_token=the_context().token is not None))


@routes.get("/jobs/<id:job_id>/explanation")
def explanation(job_id: str) -> Response:
    """Says in words why a job stands still and what to do, or that it moves."""
    return json_reply(the_context().views.explanation(job_id))


@routes.get("/jobs/<id:job_id>/series")
def series(job_id: str) -> Response:
    """Returns what happened to a job over time, in buckets."""
    query = parse(SeriesQuery, request.args.to_dict())
    return json_reply(the_context().views.series(job_id, query))
