"""Bodies and replies of the HTTP API as JSON schemas, made of the types of ``wire`` and ``protocol``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import models_json_schema

from slime_plugins.rollout_buffer.protocol import reply_models
from slime_plugins.rollout_buffer.protocol.request_models import ItemOfJob, ItemsOfJob
from slime_plugins.rollout_buffer.wire.checks import WireRecord
from slime_plugins.rollout_buffer.wire.items import Item
from slime_plugins.rollout_buffer.wire.replies import Error, StartReply

Schema = dict[str, Any]


def text(description: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": description} if description else {}), **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> dict[str, Schema]:
    """Makes a schema of every reply and of the bodies of writes; enumerations stand where they are used."""
    replies = [
        kind
        for _, kind in inspect.getmembers(reply_models, inspect.isclass)
        if issubclass(kind, WireRecord) and kind is not WireRecord
    ]
    kinds = [(kind, "validation") for kind in (*replies, Error, StartReply, Item, ItemOfJob, ItemsOfJob)]
    _, document = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is one of its literals
    definitions = document["$defs"]
    enums = {name: schema for name, schema in definitions.items() if "enum" in schema}
    return {name: _readable(schema, enums) for name, schema in definitions.items() if name not in enums}


def _readable(schema: Any, enums: Mapping[str, Schema]) -> Any:
    """Leaves titles out, puts enumerations in place of references to them, and null beside a plain type."""
    if isinstance(schema, list):
        return [_readable(entry, enums) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rsplit("/", 1)[-1]
    if name in enums:
        described = {key: value for key, value in schema.items() if key == "description"}
        return {"type": "string", "enum": enums[name]["enum"], **described}
    found = {key: _readable(value, enums) for key, value in schema.items() if not (key == "title" and value != {})}
    if found.get("default", ...) is None:
        del found["default"]
    if isinstance(found.get("description"), str):
        found["description"] = " ".join(found["description"].split())
    options = found.get("anyOf", [])
    if (
        len(options) == 2
        and options[1] == {"type": "null"}
        and isinstance(options[0].get("type"), str)
        and "enum" not in options[0]
    ):
        rest = {key: value for key, value in found.items() if key != "anyOf"}
        return {**options[0], **rest, "type": [options[0]["type"], "null"]}
    return found


COMPONENTS: Mapping[str, Schema] = {**_schemas(), "WriteBody": {"anyOf": [ref("ItemOfJob"), ref("ItemsOfJob")]}}
