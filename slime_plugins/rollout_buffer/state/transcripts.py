"""Shortens the messages of a failed attempt for storage. They are shown to people and never trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from slime_plugins.rollout_buffer.types import Message

MAX_TEXT = 4000
"""Characters of one text that are stored; of a longer text the number of omitted characters is stored as well."""
MAX_BYTES = 64 * 1024
"""Size of one transcript as JSON. Messages in the middle are omitted first."""
_FIRST_MESSAGES = 2
"""Number of messages at the beginning that are never omitted."""
_ROOM_OF_A_GAP = 200
"""Bytes reserved for the message that stands for omitted messages."""


def encode_transcript(messages: Sequence[Message]) -> bytes:
    """Returns messages as JSON of at most ``MAX_BYTES``, with long texts and images shortened; empty if none fits."""
    encoded = [_encode(message) for message in messages]
    first = encoded[:_FIRST_MESSAGES]
    newest_first: list[bytes] = []
    room = MAX_BYTES - sum(len(message) + 1 for message in first) - _ROOM_OF_A_GAP  # each message with a comma
    for message in reversed(encoded[_FIRST_MESSAGES:]):
        room -= len(message) + 1
        if room < 0:
            break
        newest_first.append(message)
    left_out = len(encoded) - len(first) - len(newest_first)
    gap = [_encode({"role": "system", "content": f"[{left_out} messages left out]"})] if left_out else []
    transcript = b"[" + b",".join([*first, *gap, *reversed(newest_first)]) + b"]"
    return transcript if encoded and len(transcript) <= MAX_BYTES else b""


def encode_failed_attempt(messages: Sequence[Message], traceback: str) -> bytes:
    """Returns what is stored of a failed attempt: its messages, and the traceback if its generator raised an error."""
    encoded = encode_transcript(messages)
    if not traceback:
        return encoded
    return b'{"messages":' + (encoded or b"[]") + b',"traceback":' + _encode(traceback) + b"}"


def decode_failed_attempt(stored: bytes | None) -> tuple[list[dict[str, Any]], str | None]:
    """Returns messages and traceback of a failed attempt, as ``encode_failed_attempt`` wrote them."""
    content = orjson.loads(stored or b"[]")
    return (content["messages"], content["traceback"]) if isinstance(content, dict) else (content, None)


def _encode(message: Message | str) -> bytes:
    try:
        return orjson.dumps(_shortened(message), option=orjson.OPT_NON_STR_KEYS, default=str)
    except (TypeError, RecursionError):  # an integer beyond 64 bits, or a value that contains itself
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
