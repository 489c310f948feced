"""Validation of the bodies and queries of requests: their base class, the types of their fields, and ``parse``.

slime's trainer sends numbers as strings, so numbers are taken from strings here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.serve_settings import validation_messages
from slime_plugins.rollout_buffer.types import MAX_EXACT_INTEGER
from slime_plugins.rollout_buffer.wire.checks import MAX_IDENTIFIER, checked_identifier

MAX_NESTING = 100
"""Deepest nesting of a job's settings, and of bodies to the gateway and to rollout servers."""
MAX_COUNT = 1_000_000_000
"""Bound of numbers without a bound of their own: far above any use, and exact in JSON and SQLite."""


def _no_bool(value: Any) -> Any:
    """Refuses booleans, which pydantic takes for numbers; strips texts, from which it parses numbers."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value.strip() if isinstance(value, str) else value


def _exact_integer(value: int) -> int:
    if abs(value) > MAX_EXACT_INTEGER:
        raise ValueError("must be an integer that JSON readers hold exactly, up to 2^53")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and not any(map(str.isspace, value))
    except ValueError:  # the text of this error may contain a password of the address
        is_url = False
    if not is_url:
        raise ValueError("must be a URL like http://host:port")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("has a bad port: a number up to 65535 is needed") from None
    return value.rstrip("/")


Count = Annotated[int, BeforeValidator(_no_bool), AfterValidator(_exact_integer)]
Number = Annotated[float, BeforeValidator(_no_bool), AfterValidator(_finite)]
Ratio = Annotated[Number, Field(ge=0, le=1)]
HttpUrl = Annotated[str, StringConstraints(max_length=2048), AfterValidator(_http_url)]
Identifier = Annotated[
    str,
    AfterValidator(checked_identifier),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_IDENTIFIER}),
]


class Body(BaseModel):
    """Base of bodies and queries. Any key that is not a field is refused as a misspelling."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=False, use_attribute_docstrings=True)


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], body: Mapping[str, Any]) -> Model:
    """Builds a record from a JSON object.

    Raises:
        InvalidPayloadError: a field is invalid; the message has a sentence for each of the first ten.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        sentences = validation_messages(error, model.model_fields)
        raise InvalidPayloadError("; ".join(sentences[:10]), {"errors": sentences[:100]}) from error
    except RecursionError as error:
        raise InvalidPayloadError("the body is nested too deeply") from error


def is_deeper_than(value: Any, levels: int) -> bool:
    """Returns True if lists and objects are nested more than ``levels`` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in parts_of(outer)]
        if not level:
            return False
    return True


def parts_of(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    """Returns the direct members of an object or a list."""
    return value.values() if isinstance(value, dict) else value
