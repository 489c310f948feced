"""Bodies and replies of the HTTP API as JSON schemas, made of the types of ``wire``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import get_original_bases, is_typeddict

from slime_plugins.rollout_buffer.openapi.operations import Schema, ref
from slime_plugins.rollout_buffer.wire import delivery_replies, group_replies, job_replies, trajectory_replies
from slime_plugins.rollout_buffer.wire.items import Item
from slime_plugins.rollout_buffer.wire.trainer_replies import Error, StartReply
from slime_plugins.rollout_buffer.wire.written_items import ItemOfJob, ItemsOfJob

REPLIES = (delivery_replies, group_replies, job_replies, trajectory_replies)


def _schemas() -> dict[str, Schema]:
    """Returns the schemas of all replies and of the bodies of writes, with enumerations inlined."""
    replies = _reply_types()
    kinds = [*replies.values(), Error, StartReply, Item, ItemOfJob, ItemsOfJob]
    adapters = [(kind.__name__, "validation", TypeAdapter[Any](kind)) for kind in kinds]
    _, document = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is one of its literals
    definitions = document["$defs"]
    for name, kind in replies.items():
        _describe_inherited(name, kind, definitions)
    enums = {name: schema for name, schema in definitions.items() if "enum" in schema}
    return {name: _readable(schema, enums) for name, schema in definitions.items() if name not in enums}


def _reply_types() -> dict[str, Any]:
    """Returns every reply, and every record in one, by name; pydantic describes their fields by the docstrings."""
    kinds: dict[str, Any] = {
        name: kind
        for module in REPLIES
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if is_typeddict(kind) or is_dataclass(kind)
    }
    for kind in kinds.values():
        kind.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True)
    return kinds


def _describe_inherited(name: str, kind: Any, definitions: dict[str, Schema]) -> None:
    """Copies descriptions of inherited fields: pydantic reads only the docstrings of the class itself."""
    for base in get_original_bases(kind) if is_typeddict(kind) else ():
        if base.__name__ in definitions:
            _describe_inherited(base.__name__, base, definitions)
            for field, described in definitions[base.__name__]["properties"].items():
                definitions[name]["properties"][field].setdefault("description", described["description"])


def _readable(schema: Any, enums: Mapping[str, Schema]) -> Any:
    """Removes titles, inlines enumerations, and writes a nullable plain type as a list of types."""
    if isinstance(schema, list):
        return [_readable(entry, enums) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rsplit("/", 1)[-1]
    if name in enums:
        described = {key: value for key, value in schema.items() if key == "description"}
        return {"type": "string", "enum": enums[name]["enum"], **described}
    is_titled = isinstance(schema.get("title"), str)  # else ``title`` is the name of a property
    readable = {key: _readable(value, enums) for key, value in schema.items() if not (key == "title" and is_titled)}
    if readable.get("default", ...) is None:
        del readable["default"]
    if isinstance(readable.get("description"), str):
        readable["description"] = " ".join(readable["description"].split())
    options = readable.get("anyOf", [])
    if (
        len(options) == 2
        and options[1] == {"type": "null"}
        and isinstance(options[0].get("type"), str)
        and "enum" not in options[0]
    ):
        rest = {key: value for key, value in readable.items() if key != "anyOf"}
        return {**options[0], **rest, "type": [options[0]["type"], "null"]}
    return readable


COMPONENTS: Mapping[str, Schema] = {**_schemas(), "WriteBody": {"anyOf": [ref("ItemOfJob"), ref("ItemsOfJob")]}}
