"""Reads the bodies of requests."""

from __future__ import annotations

import json
from typing import Any

import orjson

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.wire.request_fields import is_deeper_than


def json_object(
    content: bytes | bytearray, *, with_nan: bool = False, max_nesting: int | None = None
) -> dict[str, Any]:
    """Parses a JSON object; an empty text is an empty object.

    ``with_nan`` accepts NaN and Infinity, which are no JSON, so that a later check can name the wrong value.

    Raises:
        InvalidPayloadError: it is not a JSON object, or is nested more than ``max_nesting`` levels deep.
        MemoryError: there is not enough memory to parse it.
    """
    if not content.strip():
        return {}
    try:
        may_have_nan = with_nan and (b"NaN" in content or b"Infinity" in content)
        body = json.loads(content) if may_have_nan else orjson.loads(content)
    except (ValueError, RecursionError) as error:
        # "Failed to allocate memory" is another error of orjson: many brackets are never closed, which is invalid JSON.
        if "Not enough memory" in str(error):
            raise MemoryError(str(error)) from error
        raise InvalidPayloadError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidPayloadError("the body must be a JSON object")
    if max_nesting is not None and is_deeper_than(body, max_nesting):
        raise InvalidPayloadError(f"the body is nested more than {max_nesting} levels deep")
    return body
