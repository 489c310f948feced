"""From a device's pixels to the screenshot that is stored, sent to the engine and trained on."""

from __future__ import annotations

import io
from math import isqrt
from typing import TYPE_CHECKING, Any

from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.types import Image

if TYPE_CHECKING:
    import numpy as np

__all__ = ["encode_screenshot", "size_under"]

_JPEG_QUALITY = 92


def encode_screenshot(pixels: np.ndarray[Any, Any], max_pixels: int, image_format: str) -> Image:
    """Returns the screenshot of (height, width, 3) bytes as ``png`` or ``jpeg``, at most ``max_pixels`` large.

    Whole fractions of the size average each block of pixels, everything else is resampled.
    """
    picture = PillowImage.fromarray(pixels)
    width, height = size_under(picture.width, picture.height, max_pixels)
    if (width, height) != picture.size:
        factor = picture.width // width
        exact = (width * factor, height * factor) == picture.size
        picture = picture.reduce(factor) if exact else picture.resize((width, height), PillowImage.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if image_format == "png":
        picture.save(buffer, "PNG", compress_level=1)
    else:
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return Image(data=buffer.getvalue(), media_type=f"image/{image_format}")


def size_under(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Returns the largest size of the same shape with at most ``max_pixels``; never larger than the original."""
    if width * height <= max_pixels:
        return width, height
    new_width = max(1, isqrt(max_pixels * width // height))
    return new_width, max(1, min(new_width * height // width, max_pixels // new_width))
