"""Each route takes bodies of the size that it is for; more is refused before it is read, with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.server import http
from slime_plugins.rollout_buffer.server.app import OPERATIONS
from slime_plugins.rollout_buffer.server.body_limits import BODY_LIMITS, OTHER_ROUTES, body_limit
from slime_plugins.rollout_buffer.server.routes import write
from tests.support import PNG, written

START = {"task_type": "external", "job_id": "j", "num_repeat_per_sample": 1}


def test_every_limit_is_one_of_a_route_that_there_is_and_is_documented() -> None:
    routes = {operation.path for operation in OPERATIONS}
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    for limit in (*BODY_LIMITS, OTHER_ROUTES):
        assert limit is OTHER_ROUTES or limit.route in routes
        size = limit.within(256 * 1024 * 1024)
        shown = f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
        named = limit.route if limit is not OTHER_ROUTES else "every other route"
        assert re.search(rf"^\|[^|]*{re.escape(named)}[^|]*\|[^|]*\| {shown} \|$", page, re.MULTILINE), named


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("/get_rollout_data", 4 * 1024**2),
        ("/ack", 4 * 1024**2),
        ("/jobs/a/b/trainer_rows", 16 * 1024**2),
        ("/jobs/trainer_rows/drain", 64 * 1024),
        ("/sign_in", 64 * 1024),
        ("/jobs", 64 * 1024),
        ("/no/such/route", 64 * 1024),
    ],
)
def test_more_is_refused_with_the_limit_and_what_to_do(client: FlaskClient, path: str, size: int) -> None:
    reply = client.post(path, data=b" " * (size + 1))
    assert reply.status_code == 413
    assert reply.get_json()["error"]["code"] == "payload_too_large"
    assert f"larger than {size} bytes" in reply.get_json()["error"]["message"]
    assert body_limit(path).instead in reply.get_json()["error"]["message"]
    assert client.post(path, data=b" " * size).status_code != 413


@pytest.fixture
def small(make_client: Callable[..., FlaskClient], monkeypatch: pytest.MonkeyPatch) -> FlaskClient:
    """A server for which 4 KB are too much for a write, and 1000 lists too many for any body."""
    monkeypatch.setattr(write, "MAX_WRITE_BYTES", 4096)
    monkeypatch.setattr(http, "MAX_OBJECTS", 1000)
    return make_client()


def test_a_large_start_is_the_same_work_in_whatever_order_its_keys_come(small: FlaskClient) -> None:
    given = [{"instance_id": str(at), "text": "x" * 3000} for at in range(3)]
    reply = small.post("/start_rollout", json={**START, "instances": given, "num_epoch": 2})
    assert (reply.status_code, reply.get_json()["groups"]) == (200, 6)
    again = small.post("/start_rollout", data=orjson.dumps({"instances": given, "num_epoch": 2, **START}))
    assert again.get_json()["attached"]


@pytest.mark.parametrize("key", ["instances", "skip_instance_ids"])
def test_a_start_of_too_many_objects_is_refused_before_it_is_parsed(small: FlaskClient, key: str) -> None:
    reply = small.post("/start_rollout", json={**START, key: [[]] * 1001})
    assert (reply.status_code, reply.get_json()["error"]["message"]) == (
        413,
        "the body has more than 1000 lists and objects: send less at once",
    )
    assert small.get("/jobs").get_json()["jobs"] == []


def test_brackets_in_texts_are_no_lists_and_elements_have_a_limit(
    small: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    formula = {"instance_id": "a", "text": '\\frac{1}{2} "[quoted]" ' * 500}
    assert small.post("/start_rollout", json={**START, "instances": [formula]}).status_code == 200
    monkeypatch.setattr(http, "MAX_COMMAS", 1000)
    reply = small.post("/start_rollout", json={**START, "instances": [], "more": [0] * 1001})
    assert (reply.status_code, "more than 1000 commas" in reply.get_json()["error"]["message"]) == (413, True)


def test_items_that_are_too_large_together_are_refused_and_screenshots_do_not_count(small: FlaskClient) -> None:
    assert small.post("/start_rollout", json=START).status_code == 200
    large = written("large", messages=[{"role": "user", "content": "x" * 5000}])
    for items in ([large], [written(f"u{at}") for at in range(40)]):
        reply = small.post("/buffer/write", json={"items": items})
        assert reply.status_code == 413
        message = reply.get_json()["error"]["message"]
        assert "without its screenshots is larger than 4096 bytes: send less at once" in message
    shown = {"type": "image_url", "image_url": {"url": wire.encode_data_uri(PNG + bytes(5000))}}
    seen = written("seen", messages=[{"role": "user", "content": [shown]}])
    assert small.post("/buffer/write", json=seen).status_code == 200
