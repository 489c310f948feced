"""Addresses without the passwords in them, for whatever people read: replies, logs, errors, the command line.

The stored value stays what it was, because it is what an engine is reached with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["holds_masked_address", "redacted", "redacted_values"]

MASK: Final = "***"

# Only what has an @ behind it is looked at, so that no part of a long text is scanned twice.
_UP_TO_LAST_AT: Final = re.compile(r"(?<![^\s\"'<>])[^\s\"'<>]*@")
# Everything between the scheme and the last @ of the address; a password with a slash in it is cut off no earlier.
_CREDENTIALS: Final = re.compile(r"(?<=://)(?:[^/?#\s\"'<>]*|[^/?#\s\"'<>@:]*:[^\s\"'<>@]*)@")


def redacted(text: str) -> str:
    """Returns a text with ``***`` in place of user, password or token in each address of it."""
    return _UP_TO_LAST_AT.sub(lambda part: _CREDENTIALS.sub(f"{MASK}@", part[0]), text) if "@" in text else text


def redacted_values(values: Any) -> Any:
    """Returns a JSON value with every text in it redacted."""
    if isinstance(values, str):
        return redacted(values)
    if isinstance(values, Mapping):
        return {key: redacted_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [redacted_values(value) for value in values]
    return values


def holds_masked_address(values: Any) -> bool:
    """Tells whether a JSON value holds an address whose credentials were taken out: nothing is reached with it."""
    if isinstance(values, str):
        return f"://{MASK}@" in values
    if isinstance(values, Mapping):
        return any(map(holds_masked_address, values.values()))
    return isinstance(values, list | tuple) and any(map(holds_masked_address, values))
