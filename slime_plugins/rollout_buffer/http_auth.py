"""Pure: authentication of requests, by the token or by the cookie of a browser that has signed in with the token.

The cookie is derived from the token and contains its time of expiry, so that servers store nothing: it is valid in
every gunicorn worker and after a restart, and a new token invalidates it. The token cannot be computed from a cookie.

Browsers also send requests, with cookies, on behalf of pages of other sites. Requests that change something then have
an ``Origin`` header, which must name this server; programs send none.

A server without a token accepts only requests whose ``Host`` is a loopback name: a page of another site can make its
own name resolve to loopback (DNS rebinding), but the Host header still has that name. Pages that send to loopback
directly, without reading the reply, are refused by their ``Origin``.

``serve_settings.read_token`` reads the file of the token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from slime_plugins.rollout_buffer.errors import ForbiddenError, UnauthorizedError

SESSION_LENGTH_S = 7 * 86_400
"""How long a sign-in is valid."""
OPEN_ROUTES = frozenset({"/health", "/", "/sign_in", "/sign_out"})
"""Paths that need no token."""
OPEN_FOLDER = "/dashboard/"
"""The static files of the dashboard, which contain no data."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_access(environ: Mapping[str, Any], token: str | None, now: float) -> bool:
    """Accepts a request with the token, or with the cookie of a browser that has signed in.

    ``environ`` is the request's WSGI environment; ``token`` is None if the server requires none. Returns False for a
    request that passes only because its route needs no token.

    Raises:
        UnauthorizedError: the request has neither.
        ForbiddenError: the request may change something, and a browser sent it for a page of another site, or it has
            the cookie and no ``Origin``.
    """
    if token is not None and has_bearer(environ.get("HTTP_AUTHORIZATION"), token):
        return True
    if environ["REQUEST_METHOD"] not in READING:
        check_origin(environ.get("HTTP_ORIGIN"), environ.get("HTTP_HOST"))
    if token is None:
        return True
    if is_open(environ["PATH_INFO"]):
        return False
    cookie = _cookie(environ, cookie_name(token))
    if not _session_holds(cookie, token, now):
        raise UnauthorizedError(why_unauthorized(environ.get("HTTP_AUTHORIZATION")))
    if environ["REQUEST_METHOD"] not in READING and "HTTP_ORIGIN" not in environ:
        raise ForbiddenError("a request with a cookie must name its page (header Origin)")
    return True


def is_open(path: str) -> bool:
    """Returns True if a path needs no token."""
    return path in OPEN_ROUTES or path.startswith(OPEN_FOLDER)


def bearer_of(authorization: str | None) -> str:
    """Returns the bearer token of an ``Authorization`` header; empty without one."""
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def has_bearer(authorization: str | None, *tokens: str) -> bool:
    """Returns True if an ``Authorization`` header has one of the tokens; compares in constant time."""
    given = bearer_of(authorization)
    # All are compared: stopping at a match would show by the time which one matched.
    matches = [is_token(given, token) for token in tokens]
    return bool(given) and any(matches)


def check_bearer(authorization: str | None, *tokens: str | None) -> None:
    """Accepts a request with one of the tokens, or any request if there are no tokens.

    Raises:
        UnauthorizedError: it has none of them; the message names what is wrong with its header.
    """
    accepted = [token for token in tokens if token]
    if accepted and not has_bearer(authorization, *accepted):
        raise UnauthorizedError(why_unauthorized(authorization))


def why_unauthorized(authorization: str | None) -> str:
    """Returns a sentence on what is wrong with an ``Authorization`` header."""
    if not authorization:
        return "no token was sent: send Bearer TOKEN in the header Authorization (clients read ROLLOUT_BUFFER_TOKEN)"
    if not bearer_of(authorization):
        return "the Authorization header must say Bearer TOKEN"
    return "the token is not this server's: send the first line of its --token-file"


def is_token(given: str, token: str) -> bool:
    """Returns True if ``given`` is the token; compares in constant time."""
    return hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode("utf-8", "replace"))


def cookie_name(token: str) -> str:
    """Returns the name of the cookie, which depends on the token: buffers on other ports of a host share cookies."""
    return f"rollout_buffer_{_signed(token, 'name')[:12]}"


def issue_session(token: str, now: float) -> str:
    """Returns the cookie of a browser that signed in with the token at ``now``."""
    ends_at = str(int(now + SESSION_LENGTH_S))
    return f"{ends_at}.{_signed(token, ends_at)}"


def _session_holds(cookie: str, token: str, now: float) -> bool:
    ends_at, _, signature = cookie.partition(".")
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), _signed(token, ends_at).encode()):
        return False
    return int(ends_at) > now  # signed by us, hence a number


def _signed(token: str, text: str) -> str:
    message = f"rollout-buffer dashboard session {text}".encode("utf-8", "replace")
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def _cookie(environ: Mapping[str, Any], name: str) -> str:
    """Returns our cookie, which is never quoted.

    ``http.cookies`` takes 15 s for 30 KB of backslashes (CVE-2024-7592), and this function runs on the event loop.
    """
    for pair in environ.get("HTTP_COOKIE", "").split(";"):
        given, _, value = pair.partition("=")
        if given.strip() == name:
            return str(value.strip())
    return ""


# --- which hosts a server without a token answers for -----------------------------------------------------------------


def check_host(host: str | None, allowed: Collection[str]) -> None:
    """Accepts a request whose Host is a loopback name or one of ``allowed``.

    ``host`` is its Host header; a request without one, which browsers never send, is accepted.

    Raises:
        ForbiddenError: the request names another host.
    """
    if host is None:
        return
    name = _without_port(host.strip().lower())
    if name == "localhost" or name.endswith(".localhost") or _is_loopback(name):
        return
    if name not in {allowed_name.lower() for allowed_name in allowed}:
        raise ForbiddenError(
            f"this server does not answer for the host {host[:200]!r}: ask for 127.0.0.1, or start it with "
            "--allowed-host NAME or --token-file FILE"
        )


def check_origin(origin: str | None, host: str | None) -> None:
    """Refuses cross-site requests of browsers, by the request's headers Origin and Host.

    Raises:
        ForbiddenError: ``origin`` is another site than ``host``.
    """
    if origin is None:
        return
    site = _site_of(origin)
    if not site or site != host:
        raise ForbiddenError(f"a page of {origin[:200]} sent this: only this server's own page may")


def check_page(headers: Mapping[str, str], allowed: Collection[str]) -> None:
    """Checks Host and Origin of a request to a server without a token, as ``check_host`` and ``check_origin``.

    Raises:
        ForbiddenError: one of them is refused.
    """
    check_host(headers.get("Host"), allowed)
    check_origin(headers.get("Origin"), headers.get("Host"))


def _site_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # brackets that hold no address
        return ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and (port.isdigit() or not port) else host


def _is_loopback(name: str) -> bool:
    """Returns True for loopback addresses, and for 0.0.0.0 and ::, which also reach only this machine."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
