"""Who may ask: programs with the token, browsers that signed in, and no page of another site."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.errors import ForbiddenError, RequestError, UnauthorizedError
from slime_plugins.rollout_buffer.http_auth import SESSION_LENGTH_S, check_access, cookie_name, issue_session

TOKEN = "a-token-of-enough-characters"
HOST = "buffer.example:8889"


def ask(method: str = "GET", path: str = "/jobs", **headers: str) -> dict[str, Any]:
    named = {f"HTTP_{name.upper()}": value for name, value in headers.items()}
    return {"REQUEST_METHOD": method, "PATH_INFO": path, "HTTP_HOST": HOST, **named}


def signed_in(now: float = 0.0, token: str = TOKEN) -> str:
    return f"other=1; {cookie_name(token)}={issue_session(token, now)}"


def test_the_token_and_the_cookie_grant_access() -> None:
    check_access(ask(authorization=f"Bearer {TOKEN}"), TOKEN, 1.0)
    check_access(ask(authorization=f"bearer  {TOKEN} "), TOKEN, 1.0)
    check_access(ask(cookie=signed_in()), TOKEN, 1.0)


@pytest.mark.parametrize("path", ["/health", "/", "/sign_in", "/dashboard/app.js"])
def test_the_page_itself_needs_no_token(path: str) -> None:
    check_access(ask(path=path), TOKEN, 1.0)


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({}, r"no token was sent: send Bearer TOKEN .* \(clients read ROLLOUT_BUFFER_TOKEN\)"),
        ({"authorization": "Bearer wrong"}, "is not this server's"),
        ({"authorization": TOKEN}, "must say Bearer TOKEN"),
        ({"authorization": f"Basic {TOKEN}"}, "must say Bearer TOKEN"),
        ({"cookie": "nonsense; ="}, "no token was sent"),
        ({"cookie": signed_in(token="another-token-of-some-length")}, "no token was sent"),
        ({"cookie": f"{cookie_name(TOKEN)}=9999999999.0000"}, "no token was sent"),
        ({"cookie": f"{cookie_name(TOKEN)}=\u00e9"}, "no token was sent"),
        ({"cookie": f"{cookie_name(TOKEN)}={TOKEN}"}, "no token was sent"),
    ],
)
def test_anything_else_is_refused_with_the_reason(headers: dict[str, str], sentence: str) -> None:
    with pytest.raises(UnauthorizedError, match=sentence):
        check_access(ask(**headers), TOKEN, 1.0)


@pytest.mark.parametrize(
    "value", ['"' + 15_000 * '\\"' + '"', '"' + 30_000 * "\\" + '"', 15_000 * "a=", 30_000 * ";", 30_000 * "="]
)
def test_no_cookie_takes_long_to_read(value: str) -> None:
    """Everybody's cookies are read on the event loop, and http.cookies took 3 to 15 s for the first two."""
    began = time.process_time()
    with pytest.raises(UnauthorizedError):
        check_access(ask(cookie=f"a={value}"), TOKEN, 1.0)
    assert time.process_time() - began < 1


def test_a_session_ends() -> None:
    check_access(ask(cookie=signed_in(now=0.0)), TOKEN, SESSION_LENGTH_S - 1)
    with pytest.raises(UnauthorizedError):
        check_access(ask(cookie=signed_in(now=0.0)), TOKEN, SESSION_LENGTH_S + 1)


def test_the_end_of_a_session_cannot_be_moved() -> None:
    name, value = signed_in().split("; ")[1].split("=")
    longer = f"{name}=9{value}"
    with pytest.raises(UnauthorizedError):
        check_access(ask(cookie=longer), TOKEN, 1.0)


@pytest.mark.parametrize(
    ("origin", "token", "error"),
    [
        (f"http://{HOST}", TOKEN, None),
        (f"https://{HOST}", TOKEN, None),
        ("http://evil.example", TOKEN, ForbiddenError),
        ("null", TOKEN, ForbiddenError),
        ("", TOKEN, ForbiddenError),
        ("http://[", TOKEN, ForbiddenError),
        ("http://[::1", None, ForbiddenError),
        (None, TOKEN, ForbiddenError),
        ("http://evil.example", None, ForbiddenError),
        (None, None, None),
    ],
)
def test_what_changes_something_must_come_from_our_own_page(
    origin: str | None, token: str | None, error: type[RequestError] | None
) -> None:
    headers = {} if origin is None else {"origin": origin}
    request = ask("POST", "/jobs/j/cancel", cookie=signed_in(), **headers)
    if error is None:
        check_access(request, token, 1.0)
    else:
        with pytest.raises(error):
            check_access(request, token, 1.0)


def test_a_program_with_the_token_needs_no_origin() -> None:
    request = ask("POST", "/jobs/j/cancel", authorization=f"Bearer {TOKEN}", origin="http://anywhere")
    check_access(request, TOKEN, 1.0)


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(make_client: Callable[..., FlaskClient], tmp_path: Path) -> FlaskClient:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return make_client(token_file=file)


def test_a_browser_signs_in_acts_and_signs_out(guarded: FlaskClient) -> None:
    assert guarded.get("/overview").status_code == 401
    assert guarded.post("/sign_in", json={"token": "wrong"}).status_code == 401
    reply = guarded.post("/sign_in", json={"token": f" {TOKEN} "})
    cookie = reply.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert guarded.get("/overview").get_json()["needs_token"] is True
    assert guarded.post("/jobs/j/pause").get_json()["error"]["code"] == "forbidden"
    with_origin = guarded.post("/jobs/j/pause", headers={"Origin": "http://localhost"})
    assert with_origin.get_json()["error"]["code"] == "not_found"
    guarded.post("/sign_out")
    assert guarded.get("/overview").status_code == 401


def test_the_page_may_run_and_load_nothing_of_others(guarded: FlaskClient) -> None:
    reply = guarded.get("/")
    assert reply.status_code == 200
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    page = reply.get_data(as_text=True)
    assert "style=" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_file_that_has_not_changed_is_not_sent_again(guarded: FlaskClient) -> None:
    first = guarded.get("/dashboard/app.js")
    again = guarded.get("/dashboard/app.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (first.status_code, again.status_code, again.get_data()) == (200, 304, b"")


@pytest.mark.parametrize(
    "path", ["../server.py", "app.py", "nothing.js", "vendor", "%2e%2e/server.py", "%00.js", "a" * 300 + ".js"]
)
def test_only_the_dashboards_own_files_are_served(guarded: FlaskClient, path: str) -> None:
    assert guarded.get(f"/dashboard/{path}").status_code == 404
