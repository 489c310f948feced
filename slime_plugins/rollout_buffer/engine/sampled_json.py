"""JSON that a model wrote: read leniently, and into values that can be stored and sent. Pure."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["read_sampled_json", "said_after_thinking", "without_surrogates"]


def read_sampled_json(text: str) -> Any:
    """Returns the value; line breaks inside strings are taken, and lone surrogates replaced.

    Raises:
        ValueError: it is not JSON (NaN and the infinities are not), or nested deeper than can be read.
    """
    try:
        return without_surrogates(json.loads(text, strict=False, parse_constant=_refuse))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def said_after_thinking(text: str) -> str:
    """Returns what stands after the last ``</think>``; all of it where nothing was thought."""
    return text.rpartition("</think>")[2]


def without_surrogates(value: Any) -> Any:
    """Returns the value with lone surrogates replaced: JSON can spell them, UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(inner) for key, inner in value.items()}
    return [without_surrogates(inner) for inner in value] if isinstance(value, list) else value
