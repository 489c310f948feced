"""Number of prompt tokens of an image, by model family: the size rule of its image processor, without the processor.

An image is resized so that both sides are multiples of a factor (patch size times merge size) and its area lies within
bounds; each square of that factor is one token. The two marker tokens around an image are not counted. Families differ
only in the factor and the bounds. A model with other bounds in ``preprocessor_config.json`` gives other counts near the
bounds; the episode compares its count with the engine's and logs a difference.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

MAX_ASPECT_RATIO = 200


class ImageFamily(StrEnum):
    """Model families by size rule."""

    QWEN3_VL = "qwen3_vl"  # patches of 16 pixels, merged two by two
    QWEN2_5_VL = "qwen2_5_vl"  # patches of 14 pixels, merged two by two


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRule:
    """The sides of a resized image are multiples of ``factor`` pixels; its area in pixels lies within the bounds."""

    factor: int
    smallest_area: int
    largest_area: int

    @property
    def pixels_per_token(self) -> int:
        """Pixels per image token."""
        return self.factor**2

    def tokens_of(self, width: int, height: int) -> int:
        """Returns the number of tokens of an image, as ``image_tokens``."""
        return math.prod(resized_size(width, height, self)) // self.pixels_per_token


SIZE_RULES = {
    ImageFamily.QWEN3_VL: SizeRule(factor=32, smallest_area=65_536, largest_area=16_777_216),
    ImageFamily.QWEN2_5_VL: SizeRule(factor=28, smallest_area=3_136, largest_area=12_845_056),
}
"""Values of the published checkpoints. A new family needs an entry here and one in ``trainer.vision.FAMILIES``."""


def image_tokens(width: int, height: int, family: ImageFamily) -> int:
    """Returns the number of tokens of an image, without its two markers.

    Raises:
        ValueError: a side is not positive, or one side is more than 200 times the other.
    """
    return SIZE_RULES[family].tokens_of(width, height)


def resized_size(width: int, height: int, rule: SizeRule) -> tuple[int, int]:
    """Returns the width and height, in pixels, to which the processor resizes an image.

    Raises:
        ValueError: as ``image_tokens``.
    """
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise ValueError(f"no image processor takes an image of {width}x{height}")
    factor = rule.factor
    # round() rounds a half to even, as the processors do: 1200 / 32 = 37.5 becomes 38.
    rounded = (round(width / factor) * factor, round(height / factor) * factor)
    if math.prod(rounded) > rule.largest_area:
        shrink = math.sqrt((height * width) / rule.largest_area)
        return max(factor, _rounded_down(width / shrink, factor)), max(factor, _rounded_down(height / shrink, factor))
    if math.prod(rounded) < rule.smallest_area:
        stretch = math.sqrt(rule.smallest_area / (height * width))
        return _rounded_up(width * stretch, factor), _rounded_up(height * stretch, factor)
    return rounded


def family_with(pixels_per_token: int) -> ImageFamily | None:
    """Returns the family whose tokens cover that many pixels, or None."""
    return next((family for family, rule in SIZE_RULES.items() if rule.pixels_per_token == pixels_per_token), None)


def size_rule_of(folder: str | Path | None) -> SizeRule | None:
    """Returns the size rule in a model folder's image processor settings; None if they have no rule of this kind."""
    if folder is None:
        return None
    try:
        settings = _processor_settings(Path(folder))
        areas = settings.get("size") or {}  # areas in pixels, although the keys say edge
        return SizeRule(
            factor=int(settings["patch_size"]) * int(settings["merge_size"]),
            smallest_area=int(settings.get("min_pixels") or areas["shortest_edge"]),
            largest_area=int(settings.get("max_pixels") or areas["longest_edge"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _processor_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings file of transformers 4, or the section of transformers 5."""
    own_file = folder / "preprocessor_config.json"
    if own_file.is_file():
        return dict(json.loads(own_file.read_text("utf-8")))
    return dict(json.loads((folder / "processor_config.json").read_text("utf-8"))["image_processor"])


def image_size(data: bytes) -> tuple[int, int] | None:
    """Returns width and height of an encoded image, from its header; None if the bytes are no image."""
    from PIL import Image as PillowImage  # in the extra `android`; the functions above work without it

    try:
        with PillowImage.open(io.BytesIO(data)) as opened:
            return opened.size
    except (OSError, ValueError):
        return None


def _rounded_down(length: float, factor: int) -> int:
    return math.floor(length / factor) * factor


def _rounded_up(length: float, factor: int) -> int:
    return math.ceil(length / factor) * factor
