"""The dashboard: its page and files, signing in, and the JSON that the page polls.

The files are plain HTML, CSS and ES modules and contain no data. The content security policy allows only these files,
so that text written by a model cannot run as a script.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from flask import Response, request
from werkzeug.security import safe_join

from slime_plugins.rollout_buffer.errors import NotFoundError, UnauthorizedError
from slime_plugins.rollout_buffer.http_auth import SESSION_LENGTH_S, cookie_name, is_token, issue_session
from slime_plugins.rollout_buffer.openapi.operations import text
from slime_plugins.rollout_buffer.server.http import json_reply, revalidated, the_context
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.wire.control_requests import SignInPayload
from slime_plugins.rollout_buffer.wire.job_replies import JobExplanation, Overview, Series, SignedIn
from slime_plugins.rollout_buffer.wire.query_params import OverviewQuery, SeriesQuery

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

routes = Routes("dashboard")


# --- the page --------------------------------------------------------------------------------------------------------


@routes.get("/", reply=text(), content_types=("text/html",), needs_token=False)
def dashboard() -> Response:
    """The dashboard.

    Returns the page, which asks for the token itself.
    """
    return _send("index.html")


@routes.get(
    "/dashboard/{file}",
    reply=text(),
    content_types=("text/javascript", "text/css", "text/html", "text/plain", "image/svg+xml"),
    needs_token=False,
)
def dashboard_file(file: str) -> Response:
    """A file of the dashboard.

    Returns a script or a style sheet; they hold no data.
    """
    return _send(file)


def _send(name: str) -> Response:
    path, media_type = safe_join(str(FOLDER), name), MEDIA_TYPES.get(Path(name).suffix)
    if path is None or media_type is None or not os.path.isfile(path):
        raise NotFoundError(f"the dashboard has no file {name[:200]!r}")
    response = Response(Path(path).read_bytes(), content_type=media_type)
    response.headers.update(SECURITY_HEADERS)
    return revalidated(response)


# --- signing in ------------------------------------------------------------------------------------------------------


@routes.post("/sign_in", reply=SignedIn, errors=(401,), needs_token=False)
def sign_in(payload: SignInPayload) -> Response:
    """Sign a browser in.

    Sets a cookie that replaces the token for a week (HttpOnly, SameSite=Strict). Programs send the token itself.
    """
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


@routes.post("/sign_out", reply=SignedIn, needs_token=False)
def sign_out() -> Response:
    """Sign a browser out.

    Removes the cookie.
    """
    response = json_reply(SignedIn(signed_in=False))
    if (token := the_context().token) is not None:
        response.delete_cookie(cookie_name(token), httponly=True, samesite="Strict")
    return response


# --- data of the page -------------------------------------------------------------------------------------------------


@routes.get("/overview")
def overview(page: OverviewQuery) -> Overview:
    """State of the buffer.

    Returns the state of the supervisor and of the disk, and the jobs with their accounting and explanations.
    """
    return the_context().views.overview(page, needs_token=the_context().token is not None)


@routes.get("/jobs/{job_id}/explanation")
def explanation(job_id: str) -> JobExplanation:
    """Explain a standstill.

    Returns explanations of progress or standstill with advice, as `rollout-buffer status` and the dashboard show them.
    """
    return the_context().views.explanation(job_id)


@routes.get("/jobs/{job_id}/series")
def series(job_id: str, query: SeriesQuery) -> Series:
    """Show a job over time.

    Returns the numbers of the job in buckets of time; with `since` and `width_s` only the newest buckets.
    """
    return the_context().views.series(job_id, query)
