"""The API description names exactly the routes and payload fields that there are."""

from __future__ import annotations

import inspect
import re

from flask.testing import FlaskClient
from pydantic import BaseModel

from slime_plugins.rollout_buffer.openapi.document import openapi_document
from slime_plugins.rollout_buffer.openapi.operations import OPERATIONS
from slime_plugins.rollout_buffer.protocol import query_params, request_models
from slime_plugins.rollout_buffer.server.asgi import OWN_ROUTES


def described_routes() -> set[tuple[str, str]]:
    return {(method, path) for path, methods in openapi_document()["paths"].items() for method in methods}


def test_every_route_is_described_and_every_description_has_its_route(client: FlaskClient) -> None:
    there = set()
    for rule in client.application.url_map.iter_rules():
        path = re.sub(r"<(?:[^:<>]*:)?(\w+)>", r"{\1}", str(rule))
        there |= {(method.lower(), path) for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}
    there |= {(methods[0].lower(), path) for path, methods in OWN_ROUTES.items()}
    assert there == described_routes()


def test_every_payload_record_is_described() -> None:
    used = {kind for operation in OPERATIONS for kind in (operation.body, operation.query) if inspect.isclass(kind)}
    records = {
        kind
        for module in (request_models, query_params)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__
    }
    parts = {base for kind in used for base in kind.__mro__} | {request_models.SamplingPayload}
    assert records - parts == set()


def test_every_field_is_described_with_its_meaning() -> None:
    schemas = openapi_document()["components"]["schemas"]
    for model in (
        request_models.StartPayload,
        request_models.PollPayload,
        request_models.AckPayload,
        request_models.SamplingPayload,
    ):
        properties = schemas[model.__name__]["properties"]
        assert set(properties) == set(model.model_fields)
        assert [name for name, schema in properties.items() if not schema.get("description")] == []


def test_bounds_are_spelled_as_json_schema_spells_them() -> None:
    epochs = openapi_document()["components"]["schemas"]["StartPayload"]["properties"]["num_epoch"]
    assert epochs["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1_000_000}
    assert '"ge"' not in str(openapi_document())


def test_the_document_is_served(client: FlaskClient) -> None:
    reply = client.get("/openapi.json")
    assert (reply.status_code, reply.get_json()["openapi"]) == (200, "3.1.0")


def test_every_reference_leads_somewhere() -> None:
    document = openapi_document()
    names = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert names <= set(document["components"]["schemas"])
