"""What is kept of the messages of an attempt that failed: enough to see where it broke, never more than a few pages.

An attempt that failed is no trajectory and is never trained; its transcript is for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from slime_plugins.rollout_buffer.types import Message

MAX_TEXT = 4000
"""Characters of one text; the rest is counted."""
MAX_BYTES = 64 * 1024
"""Of one transcript as JSON. What does not fit goes from its middle: how it began and how it ended stay."""


def encode_transcript(messages: Sequence[Message]) -> bytes:
    """Returns messages as JSON of at most ``MAX_BYTES``, long texts and pictures shortened; empty when none fits."""
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
    said = encode_transcript(messages)
    if not traceback:
        return said
    return b'{"messages":' + (said or b"[]") + b',"traceback":' + _encode(traceback) + b"}"


def decode_kept(kept: bytes | None) -> tuple[list[dict[str, Any]], str | None]:
    """Returns messages and traceback of an attempt that failed, as ``encode_kept`` wrote them."""
    found = orjson.loads(kept or b"[]")
    return (found["messages"], found["traceback"]) if isinstance(found, dict) else (found, None)


def _encode(message: Message | str) -> bytes:
    return orjson.dumps(_shortened(message), option=orjson.OPT_NON_STR_KEYS, default=str)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        cut = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… {len(value) - MAX_TEXT} more"
        return cut.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no JSON
    if isinstance(value, Mapping):
        return {str(key): _shortened(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_shortened(inner) for inner in value]
    return value
