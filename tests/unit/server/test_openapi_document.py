"""The API description names exactly the routes and payload fields that there are."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel, TypeAdapter

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.openapi.document import openapi_document
from slime_plugins.rollout_buffer.openapi.schemas import COMPONENTS
from slime_plugins.rollout_buffer.server.app import OPERATIONS
from slime_plugins.rollout_buffer.server.asgi import OWN_ROUTES
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.wire import (
    StartReply,
    control_requests,
    delivery_replies,
    group_replies,
    job_replies,
    job_settings,
    poll_requests,
    query_params,
    start_request,
    trajectory_replies,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse
from tests.support import PNG_HASH, message_with_image, written


def described_routes() -> set[tuple[str, str]]:
    return {(method, path) for path, methods in openapi_document(OPERATIONS)["paths"].items() for method in methods}


def test_every_route_is_described_and_every_description_has_its_route(client: FlaskClient) -> None:
    there = set()
    for rule in client.application.url_map.iter_rules():
        path = re.sub(r"<(?:[^:<>]*:)?(\w+)>", r"{\1}", str(rule))
        there |= {(method.lower(), path) for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}
    there |= {(methods[0].lower(), path) for path, methods in OWN_ROUTES.items()}
    assert there == described_routes()


def test_no_job_can_be_named_like_a_route_of_another_job() -> None:
    below = {path.removeprefix("/jobs/{job_id}/") for _, path in described_routes() if path.count("{job_id}/")}
    for route in below - {"{verb}"} | {"cancel", "pause", "resume"}:
        with pytest.raises(InvalidPayloadError, match=f"must not end in /{route}: that is a route"):
            parse(start_request.StartPayload, {"task_type": "external", "job_id": f"a/{route}"})


def test_every_route_says_what_it_does() -> None:
    assert [operation.route for operation in OPERATIONS if not operation.summary or not operation.description] == []


def test_every_payload_record_is_described() -> None:
    used = {kind for operation in OPERATIONS for kind in (operation.body, operation.query) if inspect.isclass(kind)}
    records = {
        kind
        for module in (start_request, poll_requests, control_requests, query_params)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__
    }
    parts = {base for kind in used for base in kind.__mro__} | {job_settings.SamplingPayload}
    assert records - parts == set()


def test_every_field_is_described_with_its_meaning() -> None:
    schemas = openapi_document(OPERATIONS)["components"]["schemas"]
    for model in (
        start_request.StartPayload,
        poll_requests.PollPayload,
        poll_requests.AckPayload,
        job_settings.SamplingPayload,
    ):
        properties = schemas[model.__name__]["properties"]
        assert set(properties) == set(model.model_fields)
        assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_bounds_are_spelled_as_json_schema_spells_them() -> None:
    epochs = openapi_document(OPERATIONS)["components"]["schemas"]["StartPayload"]["properties"]["num_epoch"]
    assert epochs["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1_000_000}
    assert '"ge"' not in str(openapi_document(OPERATIONS))


def test_the_document_is_served(client: FlaskClient) -> None:
    reply = client.get("/openapi.json")
    assert (reply.status_code, reply.get_json()["openapi"]) == (200, "3.1.0")


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document(OPERATIONS)
    names = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert names <= set(document["components"]["schemas"])


# --- replies ---------------------------------------------------------------------------------------------------------


def test_every_field_of_every_reply_is_described() -> None:
    bare = [
        f"{name}.{field}"
        for name, schema in COMPONENTS.items()
        for field, entry in schema.get("properties", {}).items()
        if not entry.get("description")
    ]
    assert bare == []


def undescribed(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    """Keys of a reply that its schema does not name."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = COMPONENTS[name]
    if isinstance(value, list) and "items" in schema:
        for entry in value:
            yield from undescribed(entry, schema["items"], where)
    if isinstance(value, dict) and schema.get("properties"):
        yield from (f"{where}.{key}" for key in value if key not in schema["properties"])
        for key, entry in schema["properties"].items():
            if key in value:
                yield from undescribed(value[key], entry, f"{where}.{key}")


READS = {
    "Jobs": "/jobs",
    "JobDetails": "/jobs/j",
    "DeliveryPage": "/jobs/j/deliveries",
    "JobExplanation": "/jobs/j/explanation",
    "Series": "/jobs/j/series",
    "GroupPage": "/jobs/j/groups",
    "Group": "/groups/1",
    "TrajectoryPage": "/trajectories",
    "StoredTrajectory": "/trajectories/u0?job_id=j",
    "Overview": "/overview",
    "Health": "/health",
}


KINDS: dict[str, Any] = {
    "StartReply": StartReply,
    **vars(delivery_replies),
    **vars(group_replies),
    **vars(job_replies),
    **vars(trajectory_replies),
}


@pytest.fixture
def lived_in(client: FlaskClient) -> FlaskClient:
    """A server that has one of everything."""
    replies = {
        "StartReply": ("/start_rollout", {"task_type": "external", "num_repeat_per_sample": 2, "job_id": "j"}),
        "WriteReply": ("/buffer/write", {"items": [written("u0", reward=0.0), written("u1")]}),
        "PollReply": ("/get_rollout_data", {"lease_s": 60}),
    }
    for name, (path, body) in replies.items():
        reply = client.post(path, data=json.dumps(body))
        assert reply.status_code == 200, reply.get_data()
        hold(name, reply.get_json())
    return client


def hold(name: str, reply: Any) -> None:
    """Holds a reply to its type: what must be there is, nothing else is, and each value is of its kind."""
    TypeAdapter(KINDS[name]).validate_json(json.dumps(reply), strict=True)
    assert list(undescribed(reply, COMPONENTS[name], name)) == []


@pytest.mark.parametrize("name", READS)
def test_real_replies_are_what_their_types_say(lived_in: FlaskClient, name: str) -> None:
    reply = lived_in.get(READS[name])
    assert reply.status_code in (200, 503), reply.get_data()
    hold(name, reply.get_json())


def test_the_routes_that_answer_500_for_damaged_bytes_describe_it(client: FlaskClient) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "j", "num_repeat_per_sample": 1})
    assert client.post("/buffer/write", json=written("u", messages=[message_with_image()])).status_code == 200
    meta_info = client.post("/get_rollout_data", json={}).get_json()["data"]["meta_info"]
    context: ServerContext = client.application.extensions["rollout_buffer"]
    for pack in context.buffer.store.packs_dir.iterdir():
        os.truncate(pack, 0)
    with context.buffer.store.write() as connection:
        connection.execute("UPDATE trajectories SET body = X'00', body_place = NULL")
    names = {"job_id": "j", "uid": "u", "group_index": 1, "delivery_id": meta_info["delivery_id"]}
    names |= {"sha256": PNG_HASH, "file": "index.html"}
    paths = {op.path for op in OPERATIONS if op.method == "get"} - OWN_ROUTES.keys()
    search = {"query_string": {"text": "x"}}
    replies = {path: client.get(path.format(**names), **(search if path == "/search" else {})) for path in paths}
    damaged = {path for path, reply in replies.items() if reply.status_code == 500}
    assert damaged == {operation.path for operation in OPERATIONS if 500 in operation.statuses}
    assert {replies[path].get_json()["error"]["code"] for path in damaged} == {"damaged"}
    assert {reply.status_code for path, reply in replies.items() if path not in damaged} == {200}
