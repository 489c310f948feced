"""What the replies of the HTTP API look like, as JSON schemas: made of the types of ``protocol/reply_models.py``.

By hand is only the body of ``/buffer/write``, which is checked by ``wire.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import get_original_bases, is_typeddict

from slime_plugins.rollout_buffer.protocol import reply_models
from slime_plugins.rollout_buffer.protocol.request_models import MAX_ITEMS
from slime_plugins.rollout_buffer.types import StopReason
from slime_plugins.rollout_buffer.wire import WRITTEN_OUTCOMES

__all__ = ["COMPONENTS", "Schema", "integer", "ref", "text"]

Schema = dict[str, Any]


def text(description: str = "", **more: Any) -> Schema:
    return {"type": "string", **({"description": description} if description else {}), **more}


def integer(description: str = "", **more: Any) -> Schema:
    return {"type": "integer", **({"description": description} if description else {}), **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _reply_schemas() -> dict[str, Schema]:
    """Makes a schema of every reply type; enumerations stand where they are used."""
    own = (kind for kind in vars(reply_models).values() if is_typeddict(kind))
    kinds = {kind.__name__: kind for kind in own if kind.__module__ == reply_models.__name__}
    adapters = [(name, "serialization", TypeAdapter(kind)) for name, kind in kinds.items()]
    _, document = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the mode is one of its literals
    definitions = document["$defs"]
    enums = {name: schema for name, schema in definitions.items() if "enum" in schema}
    found = {name: _readable(schema, enums) for name, schema in definitions.items() if name in kinds}
    for name, kind in kinds.items():
        for base in (found[base.__name__] for base in get_original_bases(kind) if base.__name__ in found):
            found[name]["properties"] |= base["properties"]  # a sentence stands below the field that is inherited
    return found


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
    if isinstance(found.get("description"), str):
        found["description"] = " ".join(found["description"].split())
    options = found.get("anyOf", [])
    if len(options) == 2 and options[1] == {"type": "null"} and isinstance(options[0].get("type"), str):
        rest = {key: value for key, value in found.items() if key != "anyOf"}
        return {**options[0], **rest, "type": [options[0]["type"], "null"]}
    return found


_IDENTIFIER: Schema = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "integer"}],
    "description": "1 to 256 printable characters, or an integer",
}
_NUMBER = {"type": "number"}


def _object(required: str, /, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "properties": properties}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


_WRITTEN_ITEM = _object(
    "uid instance_id messages reward",
    uid=_described(_IDENTIFIER, "Names the trajectory; the same uid twice is one item"),
    instance_id=_described(_IDENTIFIER, "The instance it belongs to"),
    messages={
        "type": "array",
        "items": ref("ChatMessage"),
        "description": "OpenAI messages; screenshots as data URIs of PNG, JPEG or WebP, or by hash",
    },
    reward=_described(_NUMBER, "Finite"),
    raw_reward={"type": ["number", "null"], "description": "What the episode earned, when that differs"},
    turn_rewards={
        "type": ["array", "null"],
        "items": _NUMBER,
        "description": "What each turn earned: one finite number for each generation that is trained, or, without "
        "generations, for each assistant message that is",
    },
    token_rewards={
        "type": ["array", "null"],
        "items": {"type": ["array", "null"], "items": _NUMBER},
        "description": "What single tokens earned beside: for each of those turns null, or a number for each output id",
    },
    extra_info={"type": "object", "description": "Anything; `finish_reason: length` means truncated"},
    outcome=text("completed when left out", enum=[outcome.value for outcome in WRITTEN_OUTCOMES]),
    tools={"type": ["array", "null"], "description": "Shown to the chat template; kept as `extra_info.tools`"},
    stop_reason=text("stop when left out", enum=[reason.value for reason in StopReason]),
    generations={"type": ["array", "null"], "items": ref("Generation"), "description": "Token ids as sampled"},
    timings_s={"type": "object", "description": "Seconds by phase of the episode"},
)
_WRITTEN_ITEM["description"] = (
    "A finished trajectory. Any other key is kept in `extra_info`, but one that is nearly one of these is refused as a "
    "slip. `weight_version` stands in each of `generations`, which have no keys of your own."
)
_ONE_OR_MANY_ITEMS: Schema = {
    "anyOf": [
        {"allOf": [ref("WrittenItem"), {"type": "object", "properties": {"job_id": _IDENTIFIER}}]},
        _object(
            "items",
            job_id=_described(_IDENTIFIER, "May be left out while only one job is open"),
            items={
                "type": "array",
                "items": ref("WrittenItem"),
                "description": "All are checked before one is kept",
                "minItems": 1,
                "maxItems": MAX_ITEMS,
            },
        ),
    ]
}

COMPONENTS: Mapping[str, Schema] = {
    **_reply_schemas(),
    "WrittenItem": _WRITTEN_ITEM,
    "WriteBody": _ONE_OR_MANY_ITEMS,
}
