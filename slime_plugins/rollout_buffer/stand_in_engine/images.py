"""The images of a request: unpacked, checked, and counted in the tokens that Qwen3-VL would make of them."""

from __future__ import annotations

import base64
import binascii
import io
import math
from typing import Any, Final

from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.stand_in_engine.sampling import BadRequestError

__all__ = ["image_token_count", "read_images"]

SIDE: Final = 32  # patches of 16 pixels, merged two by two
SMALLEST_AREA: Final = 256 * 256
LARGEST_AREA: Final = 4096 * 4096


def read_images(image_data: Any) -> tuple[bytes, ...]:
    """The encoded images of a request's ``image_data``: data URIs or bare base64, one string or a list of them.

    Raises:
        BadRequestError: something else, or bytes that are no image.
    """
    if image_data is None:
        return ()
    entries = image_data if isinstance(image_data, list) else [image_data]
    return tuple(_read_image(entry) for entry in entries)


def image_token_count(image: bytes) -> int:
    """How many tokens one image takes in a Qwen3-VL prompt, its two markers not counted.

    Sides are rounded to multiples of 32 pixels; areas out of bounds are scaled into them first.
    """
    width, height = _size(image)
    sides = [max(SIDE, round(side / SIDE) * SIDE) for side in (width, height)]
    area = math.prod(sides)
    if area > LARGEST_AREA:
        scale = math.sqrt(width * height / LARGEST_AREA)
        sides = [max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (width, height)]
    elif area < SMALLEST_AREA:
        scale = math.sqrt(SMALLEST_AREA / (width * height))
        sides = [math.ceil(side * scale / SIDE) * SIDE for side in (width, height)]
    return math.prod(sides) // SIDE**2


def _read_image(entry: Any) -> bytes:
    if not isinstance(entry, str) or entry.startswith(("http://", "https://", "file://")):
        raise _undecodable("the stand-in engine takes data URIs and base64 only")
    encoded = entry.partition(",")[2] if entry.startswith("data:") else entry
    try:
        image = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise _undecodable(str(error)) from error
    _size(image)
    return image


def _size(image: bytes) -> tuple[int, int]:
    """Width and height; reads the header only."""
    try:
        with PillowImage.open(io.BytesIO(image)) as opened:
            return opened.size
    except (OSError, ValueError) as error:
        raise _undecodable(str(error)) from error


def _undecodable(why: str) -> BadRequestError:
    return BadRequestError({"message": f"Could not decode image: {why}"})
