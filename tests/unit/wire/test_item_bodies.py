"""A body whose items are parsed one by one says the same as one that is parsed as a whole."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.wire import item_bodies
from slime_plugins.rollout_buffer.wire.item_bodies import split_items

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(alphabet='ab"\\[]{},: \nüitems', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["items", "a", '"', "]}"]), inner),
    max_leaves=12,
)
ITEMS = st.lists(st.dictionaries(st.sampled_from(["items", "uid", "[{", '\\"']), VALUES, max_size=3), min_size=1)
OTHERS = st.dictionaries(st.sampled_from(["job_id", "items ", "x", '"items"', ""]), VALUES, max_size=3)


def together(content: bytes) -> Any:
    found = split_items(content, "items")
    assert found is not None
    body, items = found
    without = orjson.loads(body)
    assert without["items"] == []
    return {**without, "items": [orjson.loads(item) for item in items]}


@given(before=OTHERS, items=ITEMS, after=OTHERS, indent=st.none() | st.integers(0, 2))
def test_the_items_and_the_rest_are_what_the_whole_is(
    before: dict[str, Any], items: list[Any], after: dict[str, Any], indent: int | None
) -> None:
    body = {**before, "items": items, **after}
    content = json.dumps(body, indent=indent).encode()
    assert together(content) == orjson.loads(content)


@given(content=st.text(alphabet='{}[]",:\\ items1', max_size=60), at=st.integers(0, 60))
def test_what_is_no_json_does_not_become_json(content: str, at: int) -> None:
    whole = f'{{"items":[{{"uid":"a"}},{{"uid":"b"}}],"job_id":"{content[:3]}"}}'
    text = (whole[:at] + content + whole[at:]).encode()
    try:
        expected = orjson.loads(text)
    except orjson.JSONDecodeError:
        expected = None
    found = split_items(text, "items")
    if found is None:
        return
    try:
        body = orjson.loads(found[0])
        parsed = {**body, "items": [orjson.loads(item) for item in found[1]]} if body.get("items") == [] else expected
    except (orjson.JSONDecodeError, AttributeError):
        parsed = None
    assert parsed == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"uid": "a"}',
        b'{"items": {"a": 1}}',
        b'{"items": [1, 2]}',
        b'{"items": ["a", {}]}',
        b'{"items": [{} {}]}',
        b'{"items": [{},,{}]}',
        b'{"items": [{}',
        b'{"a": {"items": [{}]}}',
    ],
)
def test_a_body_that_has_no_list_of_items_stays_whole(content: bytes) -> None:
    assert split_items(content, "items") is None


@given(before=OTHERS, items=ITEMS, window=st.integers(2, 24))
def test_a_window_that_ends_anywhere_changes_nothing(before: dict[str, Any], items: list[Any], window: int) -> None:
    content = json.dumps({**before, "items": items}).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(item_bodies, "WINDOW_BYTES", window)
        assert together(content) == orjson.loads(content)


def test_a_string_that_is_too_long_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_bodies, "WINDOW_BYTES", 16)
    monkeypatch.setattr(item_bodies, "MAX_STRING_BYTES", 64)
    assert split_items(b'{"a": "' + b"x" * 40 + b'", "items": [{}]}', "items") is not None
    assert split_items(b'{"a": "' + b"x" * 400 + b'", "items": [{}]}', "items") is None
    assert split_items(b'{"a": "' + b"\\n" * 200 + b'", "items": [{}]}', "items") is None
