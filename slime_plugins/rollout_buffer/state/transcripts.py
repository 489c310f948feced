"""Shortens the messages of a failed attempt for storage. They are shown to people and never trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from slime_plugins.rollout_buffer.types import Message

MAX_TEXT = 4000
"""Characters of one text; of a longer one the number of omitted characters is stored."""
MAX_BYTES = 64 * 1024
"""Size of one transcript as JSON. Messages in the middle are omitted first."""


def encode_transcript(messages: Sequence[Message]) -> bytes:
    """Returns messages as JSON of at most ``MAX_BYTES``, with long texts and images shortened; empty if none fits."""
    written = [_encode(message) for message in messages]
    first = written[:2]
    kept: list[bytes] = []
    room = MAX_BYTES - sum(len(one) + 1 for one in first) - _ROOM_OF_A_GAP
    for one in reversed(written[2:]):
        room -= len(one) + 1
        if room < 0:
            break
        kept.append(one)
    left_out = len(written) - len(first) - len(kept)
    gap = [_encode({"role": "system", "content": f"[{left_out} messages left out]"})] if left_out else []
    found = b"[" + b",".join([*first, *gap, *reversed(kept)]) + b"]"
    return found if written and len(found) <= MAX_BYTES else b""


_ROOM_OF_A_GAP = 200


def encode_kept(messages: Sequence[Message], traceback: str) -> bytes:
    """Returns what is kept of an attempt that failed: its messages, and the traceback where its generator raised."""
    encoded = encode_transcript(messages)
    if not traceback:
        return encoded
    return b'{"messages":' + (encoded or b"[]") + b',"traceback":' + _encode(traceback) + b"}"


def decode_kept(kept: bytes | None) -> tuple[list[dict[str, Any]], str | None]:
    """Returns messages and traceback of an attempt that failed, as ``encode_kept`` wrote them."""
    found = orjson.loads(kept or b"[]")
    return (found["messages"], found["traceback"]) if isinstance(found, dict) else (found, None)


def _encode(message: Message | str) -> bytes:
    try:
        return orjson.dumps(_shortened(message), option=orjson.OPT_NON_STR_KEYS, default=str)
    except (TypeError, RecursionError):  # an integer beyond 64 bits, a value in itself
        return orjson.dumps({"role": "system", "content": "[a message that is no JSON]"})


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        cut = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… {len(value) - MAX_TEXT} more"
        return cut.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no JSON
    if isinstance(value, Mapping):
        return {str(key): _shortened(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_shortened(inner) for inner in value]
    return value
