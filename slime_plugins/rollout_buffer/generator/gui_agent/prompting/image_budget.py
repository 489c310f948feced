"""What the screenshots of an episode take of its context, and whether the engine agrees.

Known to the token where the model's family and the screenshot's size are; an estimate otherwise. The engine has the
last word: where it counts otherwise, its count is used from then on, and the difference is kept. For a family that is
known, a difference means that the engine prepares images, or tokens, in another way than the trainer will.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from slime_plugins.rollout_buffer.engine.image_tokens import ImageFamily, image_size, image_tokens
from slime_plugins.rollout_buffer.types import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMismatch:
    """The images of one prompt, in tokens: what the size rule makes of them, and what the engine made of them."""

    expected: int
    reported: int


class ImageBudget:
    """Counts the tokens of one episode's images. ``mismatch`` is the first difference to the engine's own count."""

    def __init__(self, family: ImageFamily | None, *, estimate: int) -> None:
        """``estimate`` is taken for an image whose family or size is not known."""
        self._family = family
        self._estimate = estimate
        self._measured: int | None = None
        self._tokens_by_hash: dict[str, int | None] = {}
        self.mismatch: PromptMismatch | None = None

    def tokens(self, images: Sequence[Image]) -> int:
        """Returns what the images take together, markers not counted."""
        if self._measured is not None:
            return self._measured * len(images)
        known = [self._exact(image) for image in images]
        return sum(self._estimate if tokens is None else tokens for tokens in known)

    def compare(self, images: Sequence[Image], reported: int | None) -> None:
        """Takes over how many tokens the engine made of a prompt's images; None where it does not say."""
        if reported is None or not images:
            return
        counted_by_rule = self._measured is None and all(self._exact(image) is not None for image in images)
        expected = self.tokens(images)
        if counted_by_rule and reported == expected:
            return
        if counted_by_rule:
            self.mismatch = PromptMismatch(expected=expected, reported=reported)
            _warn_once(str(self._family), expected, reported)
        if reported >= len(images):
            self._measured = -(-reported // len(images))

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
    except ValueError:  # an image that no processor takes: the engine will say so
        return None


@functools.lru_cache(maxsize=16)
def _warn_once(family: str, expected: int, reported: int) -> None:
    logger.warning(
        "the engine made %d tokens of images that are %d by the size rule of %s: it prepares images in another way, "
        "and what the trainer makes of such episodes will not be what the model saw",
        reported,
        expected,
        family,
    )
