"""Counts the tokens of an episode's screenshots, and compares the count with the engine's.

The count is exact if the model's family and the screenshot's size are known; an estimate otherwise. If the engine's
count differs, it is used from then on. The first difference from an exact count is kept in ``mismatch``: the engine
resizes images differently from the trainer, or has another tokenizer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_size, image_tokens
from slime_plugins.rollout_buffer.types import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMismatch:
    """Tokens of the images of one prompt, by the size rule and by the engine."""

    expected: int
    reported: int


class ImageTokenCounter:
    """Counts the tokens of one episode's images. ``mismatch``: an exact count that differed from the engine's."""

    def __init__(self, family: ImageFamily | None, *, estimate: int) -> None:
        """``estimate`` is the count of an image of unknown family or size."""
        self._family = family
        self._estimate = estimate
        self._measured: int | None = None
        self._tokens_by_hash: dict[str, int | None] = {}
        self.mismatch: PromptMismatch | None = None

    def tokens(self, images: Sequence[Image]) -> int:
        """Returns the number of tokens of the images, without markers."""
        if self._measured is not None:
            return self._measured * len(images)
        counts = [self._exact(image) for image in images]
        return sum(self._estimate if tokens is None else tokens for tokens in counts)

    def compare(self, images: Sequence[Image], reported: int | None) -> None:
        """Takes over ``reported``, the engine's count, if it differs; None if the engine reports none."""
        if reported is None or not images:
            return
        counted_by_rule = self._measured is None and all(self._exact(image) is not None for image in images)
        expected = self.tokens(images)
        if counted_by_rule and reported == expected:
            return
        if counted_by_rule:
            self.mismatch = PromptMismatch(expected=expected, reported=reported)
            _warn_once(str(self._family), expected, reported)
        if reported >= len(images):  # otherwise it is no count of these images: each has at least one token
            self._measured = -(-reported // len(images))  # per image, rounded up

    def _exact(self, image: Image) -> int | None:
        if image.sha256 not in self._tokens_by_hash:
            self._tokens_by_hash[image.sha256] = _tokens_of(image, self._family)
        return self._tokens_by_hash[image.sha256]


def _tokens_of(image: Image, family: ImageFamily | None) -> int | None:
    size = None if family is None else image_size(image.data)
    if size is None or family is None:
        return None
    try:
        return image_tokens(*size, family)
    except ValueError:  # an invalid image size: the engine will refuse it
        return None


@functools.lru_cache(maxsize=16)
def _warn_once(family: str, expected: int, reported: int) -> None:
    logger.warning(
        "the engine made %d tokens of images that are %d by the size rule of %s: it preprocesses images differently, "
        "and the trainer's input will differ from the engine's",
        reported,
        expected,
        family,
    )
