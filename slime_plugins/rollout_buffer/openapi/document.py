"""The document of ``GET /openapi.json``: the OpenAPI 3.1 description of every route.

A test compares it with the routes of the server, and Schemathesis with their replies.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from slime_plugins.rollout_buffer.openapi.operations import ERRORS, JSON, PATH_PARAMETERS, Operation, Schema, ref
from slime_plugins.rollout_buffer.openapi.schemas import COMPONENTS


@functools.cache
def openapi_document(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document. Each call returns the same object, which must not be changed."""
    schemas = {name: dict(schema) for name, schema in COMPONENTS.items()}
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rollout Buffer",
            "version": "1",
            "description": "A durable rollout buffer for training agents. Errors are JSON: `error.code` for programs, "
            "`error.message` for people.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(operation),
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation)],
        "responses": _responses(operation),
        # The empty alternative is for a server without --token-file, which asks for no token.
        "security": [{"token": []}, {}] if operation.needs_token else [{}],
    }
    if operation.body is not None:
        schema = _body_schema(operation.body, schemas)
        described["requestBody"] = {"content": {kind: {"schema": schema} for kind in operation.body_types}}
    return described


def _operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/")
    return "_".join([operation.method, *words])


def _path_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": PATH_PARAMETERS[name]}


def _query_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    if operation.query is None:
        return
    document = operation.query.model_json_schema()
    for name, schema in document["properties"].items():
        resolved = _without_null(_bounds_by_name(_resolved(schema, document.get("$defs", {}))))
        description = resolved.pop("description", "")
        yield {"name": name, "in": "query", "required": False, "description": description, "schema": resolved}


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Inlines references in a parameter's schema."""
    if isinstance(schema, dict) and "$ref" in schema:
        referenced = _resolved(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {
            **{key: value for key, value in referenced.items() if key not in ("title", "description")},
            **{key: value for key, value in schema.items() if key != "$ref"},
        }
    if isinstance(schema, dict):
        return {key: _resolved(value, definitions) for key, value in schema.items() if key != "title"}
    if isinstance(schema, list):
        return [_resolved(value, definitions) for value in schema]
    return schema


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Removes null from the schema of a query parameter, which is left out instead."""
    options = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key != "anyOf" and not (key == "default" and value is None)}
    if len(options) == 1:
        return {**options[0], **rest}
    return {**rest, "anyOf": options} if options else rest


def _body_schema(body: type[BaseModel] | Schema, schemas: dict[str, Any]) -> Schema:
    if isinstance(body, dict):
        return body
    document = body.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, schema in {**document.pop("$defs", {}), body.__name__: document}.items():
        schemas[name] = _numbers_also_as_strings(_bounds_by_name(schema))
    return ref(body.__name__)


_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def _bounds_by_name(schema: Any) -> Any:
    """Replaces pydantic's names of bounds by JSON Schema's: behind custom validators pydantic does not do so."""
    if isinstance(schema, list):
        return [_bounds_by_name(entry) for entry in schema]
    if isinstance(schema, dict):
        return {_BOUNDS.get(key, key): _bounds_by_name(value) for key, value in schema.items()}
    return schema


def _numbers_also_as_strings(schema: Any) -> Any:
    """Also allows strings for numbers, because slime's trainer sends numbers as strings."""
    if isinstance(schema, list):
        return [_numbers_also_as_strings(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("integer", "number"):
        annotations = {key: schema[key] for key in ("default", "description", "title") if key in schema}
        number = {key: value for key, value in schema.items() if key not in annotations}
        return {**annotations, "anyOf": [number, {"type": "string", "description": "The same number as a string"}]}
    return {key: _numbers_also_as_strings(value) for key, value in schema.items()}


def _responses(operation: Operation) -> dict[str, Any]:
    reply, description = operation.reply, operation.summary
    if not isinstance(reply, dict):
        description = COMPONENTS[reply.__name__]["description"]
        reply = ref(reply.__name__)
    content = {content_type: {"schema": reply} for content_type in operation.content_types}
    responses: dict[str, Any] = {"200": {"description": description, "content": content}}
    for status, (description, schema) in operation.other_replies.items():
        responses[str(status)] = {"description": description, "content": {JSON: {"schema": schema}}}
    for status in sorted(operation.statuses):
        responses[str(status)] = {"description": ERRORS[status], "content": {JSON: {"schema": ref("Error")}}}
    return responses
