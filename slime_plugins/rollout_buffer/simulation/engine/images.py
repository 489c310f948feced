"""The images of a request: unpacked, checked, and counted in the tokens that Qwen3-VL would make of them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from slime_plugins.rollout_buffer.engine.image_tokens import ImageFamily, image_size, image_tokens
from slime_plugins.rollout_buffer.simulation.engine.sampling import BadRequestError

__all__ = ["image_token_count", "read_images"]


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

    Raises:
        BadRequestError: a shape that the model's processor does not take.
    """
    try:
        return image_tokens(*_size(image), ImageFamily.QWEN3_VL)
    except ValueError as error:
        raise _undecodable(str(error)) from error


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
    size = image_size(image)
    if size is None:
        raise _undecodable("these bytes are no picture")
    return size


def _undecodable(why: str) -> BadRequestError:
    return BadRequestError({"message": f"Could not decode image: {why}"})
