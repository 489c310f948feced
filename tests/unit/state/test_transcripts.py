"""What is kept of an attempt that failed: its beginning and its end, in bounds, whatever was said."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.state.transcripts import MAX_BYTES, encode_transcript


def said(number: int, length: int = 10) -> dict[str, Any]:
    """A message of that many letters, with its number."""
    return {"role": "user", "content": f"{number}:" + "x" * length}


def test_a_long_conversation_keeps_its_beginning_and_its_end() -> None:
    kept = orjson.loads(encode_transcript([said(number, 900) for number in range(500)]))
    assert [one["content"].partition(":")[0] for one in kept[:2]] == ["0", "1"]
    assert kept[-1]["content"].startswith("499:")
    left_out = 500 - (len(kept) - 1)
    assert kept[2] == {"role": "system", "content": f"[{left_out} messages left out]"}


ANYTHING = st.recursive(
    st.sampled_from([None, True, 0.5, 2**64, "\ud800", "z" * 9000]) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("\ud800"), inner, max_size=4),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), ANYTHING), max_size=30))
def test_whatever_was_said_is_json_within_bounds(messages: list[dict[str, Any]]) -> None:
    kept = encode_transcript(messages)
    assert len(kept) <= MAX_BYTES
    assert kept == b"" or len(orjson.loads(kept)) <= len(messages) + 1
