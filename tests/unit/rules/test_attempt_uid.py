"""Names of attempts are read as they are written; what names no attempt is no error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from tests.example_counts import examples

NUMBERS = st.integers(min_value=0, max_value=10**16 - 1)


@examples(100)
@given(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_a_name_that_was_written_is_read_as_the_same_attempt(parts: tuple[int, int, int, int, int]) -> None:
    job_key, epoch, position, slot, attempt = parts
    uid = AttemptUid(job_key=job_key, epoch=epoch, position=position, slot=slot, attempt=attempt)
    assert AttemptUid.parse(str(uid)) == uid


@examples(200)
@given(st.text(alphabet="0123456789.-+ _x٣", max_size=20))
def test_whatever_is_read_as_an_attempt_is_spelled_like_that(text: str) -> None:
    uid = AttemptUid.parse(text)
    assert uid is None or str(uid) == text


@pytest.mark.parametrize(
    "text", ["", "1.0.0.0", "1.0.0.0.0.0", "1.0.0.0.", "1.0.0.0.-1", "01.0.0.0.0", "1.0.0.0.٣", f"{'9' * 5000}.0.0.0.0"]
)
def test_what_names_no_attempt_is_none(text: str) -> None:
    assert AttemptUid.parse(text) is None
