"""Runs Flask's routes in threads; the event loop sends the reply."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flask import Flask

Environ = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in ASGI's terms; the content of a long reply is an iterator of parts."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content: bytes | Iterator[bytes]


def environ_of(scope: Any) -> Environ:
    """Returns the WSGI environment of a request, without its body."""
    server, client = scope.get("server") or ("", 0), scope.get("client") or ("", 0)
    environ: Environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": scope["path"].encode().decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_NAME": str(server[0]),
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "REMOTE_ADDR": str(client[0]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    for name, value in scope["headers"]:
        if name in (b"content-length", b"transfer-encoding"):
            continue
        key = name.decode("latin-1").upper().replace("-", "_")
        key = key if key == "CONTENT_TYPE" else f"HTTP_{key}"
        text = value.decode("latin-1")
        environ[key] = f"{environ[key]},{text}" if key in environ else text
    return environ


def call(flask: Flask, environ: Environ, body: bytes) -> Reply:
    """Returns Flask's reply; called in a thread."""
    request = {**environ, "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
    with flask.request_context(request):
        response = flask.full_dispatch_request()
    pieces, status, headers = response.get_wsgi_response(request)
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return Reply(int(status[:3]), encoded, iter(pieces) if response.is_streamed else b"".join(pieces))
