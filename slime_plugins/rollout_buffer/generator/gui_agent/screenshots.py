"""Resizes and encodes screenshots; the result is stored, sent to the engine and trained on."""

from __future__ import annotations

import io
from math import isqrt
from typing import TYPE_CHECKING, Any

from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.types import Image

if TYPE_CHECKING:
    import numpy as np

_JPEG_QUALITY = 92


def encode_screenshot(pixels: np.ndarray[Any, Any], max_pixels: int, image_format: str) -> Image:
    """Returns the screenshot of (height, width, 3) bytes as ``png`` or ``jpeg``, at most ``max_pixels`` large.

    A reduction by a whole factor averages each block of pixels; any other reduction resamples.
    """
    picture = PillowImage.fromarray(pixels)
    width, height = fit_under_pixel_cap(picture.width, picture.height, max_pixels)
    if (width, height) != picture.size:
        factor = picture.width // width
        exact = (width * factor, height * factor) == picture.size
        picture = picture.reduce(factor) if exact else picture.resize((width, height), PillowImage.Resampling.LANCZOS)
    return Image(data=encode_picture(picture, image_format), media_type=f"image/{image_format}")


def encode_picture(picture: PillowImage.Image, image_format: str) -> bytes:
    """Returns the bytes of a picture as ``png`` (fast compression) or ``jpeg`` (high quality)."""
    buffer = io.BytesIO()
    if image_format == "png":
        picture.save(buffer, "PNG", compress_level=1)
    else:
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return buffer.getvalue()


def fit_under_pixel_cap(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Returns the largest size of the same aspect ratio with at most ``max_pixels``; never larger than the original.

    Integer arithmetic, so the result is the same on every machine: 1080x2400 under 648,000 is exactly 540x1200.

    Raises:
        ValueError: a size or the cap is not positive.
    """
    if width < 1 or height < 1 or max_pixels < 1:
        raise ValueError(f"sizes and cap must be positive, got {width}x{height} under {max_pixels}")
    if width * height <= max_pixels:
        return width, height

    new_width = max(1, isqrt(max_pixels * width // height))
    new_height = max(1, min(new_width * height // width, max_pixels // new_width))
    return min(new_width, max_pixels), new_height
