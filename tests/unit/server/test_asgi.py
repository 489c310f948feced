"""The application behind the HTTP server: what it answers when it cannot, and who may send how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.asgi import SMALL_BODY, create_application
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher
from tests.support import written

TOKEN = "a secret of sixteen letters"
START = {"task_type": "external", "num_repeat_per_sample": 1, "job_id": "j"}


def post(client: FlaskClient, path: str, body: Any, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, data=content, headers=headers)


def out_of_memory(*_: object, **__: object) -> Any:
    raise MemoryError


def no_room_to_parse(_content: bytes) -> Any:
    raise orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0)


@pytest.mark.parametrize("path", ["/buffer/write", "/start_rollout", "/get_rollout_data"])
def test_a_body_that_there_is_no_memory_to_parse_is_503_and_not_wrong(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    post(client, "/start_rollout", START)
    monkeypatch.setattr("slime_plugins.rollout_buffer.server.http.orjson.loads", no_room_to_parse)
    reply = post(client, path, {**written("u"), "job_id": "j"})
    monkeypatch.undo()
    assert (reply.status_code, reply.get_json()["error"]["code"]) == (503, "unavailable")
    assert int(reply.headers["Retry-After"]) > 0


def test_when_memory_runs_out_in_the_middle_of_a_write_it_may_be_sent_again(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(client, "/start_rollout", START)
    with monkeypatch.context() as patched:
        patched.setattr("slime_plugins.rollout_buffer.server.routes.write.extract_images", out_of_memory)
        assert post(client, "/buffer/write", {**written("u"), "job_id": "j"}).status_code == 503
    assert post(client, "/buffer/write", {**written("u"), "job_id": "j"}).get_json()["results"][0]["status"] == "stored"


def test_every_503_says_when_to_come_again(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object) -> Any:
        raise UnavailableError("the store is busy")

    monkeypatch.setattr(Buffer, "resolve_job", busy)
    monkeypatch.setattr(Buffer, "jobs", busy)
    for reply in (post(client, "/get_rollout_data", {}), client.get("/jobs")):
        assert reply.status_code == 503
        assert int(reply.headers["Retry-After"]) > 0


def test_with_a_token_only_small_bodies_are_taken_without_it(
    make_client: Callable[..., FlaskClient], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    client = make_client(token_file=tmp_path / "token")
    carries = {"Authorization": f"Bearer {TOKEN}"}
    assert post(client, "/start_rollout", START, **carries).status_code == 200
    large = {**written("u", extra_info={"x": "y" * SMALL_BODY}), "job_id": "j"}
    for path in ("/buffer/write", "/sign_in", "/sign_out"):
        assert post(client, path, large).status_code == 401
    assert post(client, "/sign_in", {"token": TOKEN}).status_code == 200
    assert post(client, "/buffer/write", large, **carries).status_code == 200


def test_a_method_that_a_data_route_does_not_have_is_405(client: FlaskClient) -> None:
    for path in ("/buffer/write", "/get_rollout_data"):
        assert client.get(path).status_code == 405
        assert client.delete(path).status_code == 405
    assert client.post("/health").status_code == 405
    assert client.head("/health").status_code == 200


async def test_a_write_that_a_stopping_server_gives_up_is_503_and_may_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()

    async def never(_self: object, _body: bytes) -> Any:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(WriteBatcher, "write", never)
    application = create_application(ServeSettings(data_dir=tmp_path / "data"))
    headers = [(b"host", b"localhost"), (b"content-length", b"2")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/buffer/write", "query_string": b""}
    scope |= {"raw_path": b"/buffer/write", "root_path": "", "scheme": "http", "headers": headers}
    scope |= {"client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8889)}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    request = asyncio.ensure_future(application(scope, receive, send))
    await waits.wait()
    request.cancel()
    await request
    application.close()
    assert sent[0]["status"] == 503
    assert b"retry-after" in {name.lower() for name, _ in sent[0]["headers"]}
    assert json.loads(sent[1]["body"])["error"]["code"] == "unavailable"
