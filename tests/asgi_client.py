"""The whole application for tests that speak WSGI: Flask's test client, werkzeug's server, Schemathesis.

Requests go through the ASGI application as the HTTP server would hand them over, on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.serving import make_server

from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.app import create_app as create_flask
from slime_plugins.rollout_buffer.server.asgi import Application


def create_app(settings: ServeSettings) -> Flask:
    """Builds Flask's application, with the routes that are not Flask's."""
    flask = create_flask(settings)
    flask.wsgi_app = _ThroughAsgi(Application(flask))  # type: ignore[method-assign]  # how Flask wants it wrapped
    return flask


def post(client: FlaskClient, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Posts a body as JSON, or as it is where it is bytes; returns the status and the reply."""
    reply = client.post(path, data=body if isinstance(body, bytes) else json.dumps(body), headers=headers)
    return reply.status_code, reply.get_json()


@contextmanager
def serving_wsgi(app: Callable[..., Any]) -> Iterator[str]:
    """Serves an application in threads on a free port; yields its URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _ThroughAsgi:
    def __init__(self, application: Application) -> None:
        self._application = application
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        body = environ["wsgi.input"].read(int(length)) if length else b""
        future = asyncio.run_coroutine_threadsafe(self._exchange(environ, body), self._loop)
        status, headers, content = future.result(60)
        start_response(f"{status} whatever", [(name.decode(), value.decode()) for name, value in headers])
        return [content]

    async def _exchange(self, environ: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        sent: list[dict[str, Any]] = []
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not received:
                await asyncio.Event().wait()  # the client stays
            return received.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._application(_scope(environ), receive, send)
        return sent[0]["status"], sent[0]["headers"], b"".join(message["body"] for message in sent[1:])


def _scope(environ: dict[str, Any]) -> dict[str, Any]:
    headers = [
        (key.removeprefix("HTTP_").lower().replace("_", "-").encode(), value.encode("latin-1"))
        for key, value in environ.items()
        if key.startswith("HTTP_") or (key in ("CONTENT_TYPE", "CONTENT_LENGTH") and value)
    ]
    return {
        "type": "http",
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "scheme": "http",
        "path": environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace"),
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
    }
