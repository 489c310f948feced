"""One route with one method for OpenAPI; ``server/routing.py`` builds it from the route's function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
JSON = "application/json"
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")

ERRORS: Mapping[int, str] = {
    400: "A field is missing or wrong; the message names it.",
    401: "The bearer token is missing or wrong.",
    403: "A page of another site made a browser send it, or the server does not answer for that host.",
    404: "There is no such thing.",
    409: "The request contradicts what is stored, or names too little to choose by.",
    413: "The body, or the list in it, is too large.",
    415: "The body is compressed; send it as it is.",
    422: "The job does not take what was sent; the message says why.",
    500: "`damaged`: stored bytes are missing or wrong. `internal`: a defect.",
    503: "Cannot be done now; the same request may succeed after Retry-After.",
    507: "The disk is full. What was acknowledged is safe.",
}


PATH_PARAMETERS: Mapping[str, Schema] = {
    "job_id": {"type": "string", "minLength": 1, "description": "The job's id; slashes in it may stand as they are"},
    "verb": {"type": "string", "enum": ["cancel", "pause", "resume"]},
    "delivery_id": {"type": "string", "minLength": 1},
    "uid": {"type": "string", "minLength": 1},
    "group_index": {"type": "integer", "minimum": 0, "description": "As in a delivered item"},
    "sha256": {"type": "string", "description": "sha256 of the bytes: 64 hexadecimal digits, lower case"},
    "file": {"type": "string", "minLength": 1},
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    """One route with one method."""

    route: str
    """Method and path."""
    summary: str
    description: str
    reply: type | Schema
    """A class of ``wire/``, or a schema."""
    body: type[BaseModel] | Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    query: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    """Error statuses in addition to those that ``statuses`` derives."""
    content_types: tuple[str, ...] = (JSON,)
    other_replies: Mapping[int, tuple[str, Schema]] = field(default_factory=dict)
    needs_token: bool = True

    @property
    def method(self) -> str:
        """The method in lower case."""
        return self.route.split()[0].lower()

    @property
    def path(self) -> str:
        """The path with parameters in braces."""
        return self.route.split()[1]

    @property
    def statuses(self) -> set[int]:
        """All error statuses of the route."""
        statuses = {403, *self.errors}
        if self.body is not None:
            statuses |= {400, 413, 415}
        if self.query is not None:
            statuses.add(400)
        if "{" in self.path and self.method != "put":
            statuses.add(404)
        if self.needs_token:
            statuses |= {401, 503} if self.method == "get" else {401, 503, 507}
        return statuses


def text(**more: Any) -> Schema:
    """Returns the schema of a text."""
    return {"type": "string", **more}


def ref(name: str) -> Schema:
    """Returns a reference to a schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}
