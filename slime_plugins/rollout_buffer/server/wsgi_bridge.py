"""Flask's routes, served by threads beside the event loop.

A thread makes a reply and is free again: while its client reads, the loop waits, and a reply that Flask makes piece by
piece is continued by whichever thread is free when its client has read.
"""

from __future__ import annotations

import contextvars
import io
import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

Environ = dict[str, Any]
WsgiApplication = Callable[..., Iterable[bytes]]

PROXIES = frozenset({"127.0.0.1", "::1"})
PIECE_BYTES = 256 * 1024
"""A long reply is sent in about such pieces."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply; one whose size Flask does not know comes piece by piece, each made when it is asked for."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content: bytes | Generator[bytes, None, None]


def environ_of(scope: Any) -> Environ:
    """Returns a request without its body as WSGI has it.

    Headers whose name has an underscore are left out: they would pass for others.
    """
    server, client = scope.get("server") or ("", 0), scope.get("client") or ("", 0)
    environ: Environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_NAME": str(server[0]),
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "REMOTE_ADDR": str(client[0]),
        "REMOTE_PORT": str(client[1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": _scheme(scope),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    for name, value in scope["headers"]:
        if b"_" in name or name in (b"content-length", b"transfer-encoding"):
            continue
        key = name.decode("latin-1").upper().replace("-", "_")
        key = key if key == "CONTENT_TYPE" else f"HTTP_{key}"
        text = value.decode("latin-1")
        environ[key] = f"{environ[key]},{text}" if key in environ else text
    return environ


def with_body(environ: Environ, body: bytes) -> Environ:
    """Returns the request with its body."""
    return {**environ, "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}


def _scheme(scope: Any) -> str:
    """Returns how the client came; a proxy on this machine, which ended TLS, says so."""
    client = scope.get("client") or ("", 0)
    if client[0] in PROXIES and (b"x-forwarded-proto", b"https") in scope["headers"]:
        return "https"
    return str(scope["scheme"])


def call(application: WsgiApplication, environ: Environ) -> Reply:
    """Returns what a WSGI application answers; called in a thread, as whatever asks for a reply's next piece."""
    context = contextvars.copy_context()
    head: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> None:
        head[:] = [status, headers]

    result = context.run(application, environ, start_response)
    status, headers = head
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    pieces = _pieces(context, result)
    whole = any(name == b"content-length" for name, _ in encoded)
    return Reply(int(status.split(" ", 1)[0]), encoded, b"".join(pieces) if whole else pieces)


def _pieces(context: contextvars.Context, result: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Yields a result's pieces, small ones together; what makes them finds its context in every thread."""
    try:
        iterator = iter(result)
        pieces: list[bytes] = []
        size = 0
        while (piece := context.run(next, iterator, None)) is not None:
            pieces.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
        yield b"".join(pieces)
    finally:
        close = getattr(result, "close", None)
        if close is not None:
            context.run(close)
