"""Image tokens are counted as the real image processors count them, and an engine that counts otherwise is noticed."""

from __future__ import annotations

import importlib
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.engine.image_token_counts import (
    SIZE_RULES,
    ImageFamily,
    family_with,
    image_size,
    image_tokens,
    resized_size,
)
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.image_token_counter import (
    ImageTokenCounter,
    PromptMismatch,
)
from slime_plugins.rollout_buffer.types import Image
from tests.pictures import png

QWEN3, QWEN2_5 = ImageFamily.QWEN3_VL, ImageFamily.QWEN2_5_VL


def blank(width: int, height: int) -> Image:
    return Image(data=png((width, height), (3, 90, 200)))


@pytest.mark.parametrize(
    ("width", "height", "family", "tokens"),
    [
        (540, 1200, QWEN3, 646),
        (1080, 2400, QWEN3, 2550),
        (270, 600, QWEN3, 152),
        (128, 256, QWEN3, 72),
        (64, 128, QWEN3, 72),
        (1080, 2400, QWEN2_5, 3354),
        (720, 1600, QWEN2_5, 1482),
    ],
)
def test_tokens_are_those_that_engines_were_seen_to_count(
    width: int, height: int, family: ImageFamily, tokens: int
) -> None:
    assert image_tokens(width, height, family) == tokens


@pytest.mark.parametrize("family", ImageFamily)
@given(width=st.integers(1, 9000), height=st.integers(1, 9000))
def test_the_rule_is_that_of_the_real_processor_at_any_size(family: ImageFamily, width: int, height: int) -> None:
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    smart_resize = importlib.import_module(name).smart_resize
    rule = SIZE_RULES[family]
    bounds = {"factor": rule.factor, "min_pixels": rule.smallest_area, "max_pixels": rule.largest_area}
    try:
        expected = smart_resize(height, width, **bounds)
    except ValueError:
        with pytest.raises(ValueError, match="no image processor"):
            resized_size(width, height, rule)
    else:
        assert resized_size(width, height, rule) == (expected[1], expected[0])


def test_a_family_is_known_by_what_its_tokens_cover() -> None:
    assert [family_with(pixels) for pixels in (1024, 784, 196)] == [QWEN3, QWEN2_5, None]


def test_a_size_is_read_from_pictures_alone() -> None:
    assert image_size(blank(30, 70).data) == (30, 70)
    assert image_size(b"no picture") is None


def test_a_budget_counts_to_the_token_and_agrees_with_an_engine_that_does() -> None:
    images = [blank(540, 1200), blank(270, 600)]
    counter = ImageTokenCounter(QWEN3, estimate=9)

    counter.compare(images, 646 + 152)

    assert (counter.tokens(images), counter.mismatch) == (798, None)


def test_an_engine_that_counts_otherwise_is_believed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    images = [blank(540, 1200)]
    counter = ImageTokenCounter(QWEN2_5, estimate=9)
    expected = image_tokens(540, 1200, QWEN2_5)

    with caplog.at_level(logging.WARNING):
        counter.compare(images, 646)
        counter.compare(images * 2, 2 * 646)

    assert counter.mismatch == PromptMismatch(expected=expected, reported=646)
    assert counter.tokens(images) == 646
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_a_known_size_an_estimate_serves_until_the_engine_counts() -> None:
    images = [Image(data=b"one"), Image(data=b"two")]
    unknown_family, unreadable = ImageTokenCounter(None, estimate=40), ImageTokenCounter(QWEN3, estimate=40)

    assert (unknown_family.tokens(images), unreadable.tokens(images)) == (80, 80)
    unreadable.compare(images, 101)
    assert unreadable.tokens(images) == 102
    assert unreadable.mismatch is None


def test_an_engine_that_counts_nothing_changes_nothing() -> None:
    counter = ImageTokenCounter(QWEN3, estimate=40)
    counter.compare([Image(data=b"one")], None)
    counter.compare([], 999)
    assert counter.tokens([Image(data=b"one")]) == 40
