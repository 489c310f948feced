"""The images of a request: unpacked, and checked to be pictures."""

from __future__ import annotations

import base64
from typing import Any

from rollout_buffer_lab.sglang_routes.sampling import BadRequestError
from slime_plugins.rollout_buffer.engine.image_token_counts import image_size


def read_images(image_data: Any) -> tuple[bytes, ...]:
    """The encoded images of a request's ``image_data``: data URIs or bare base64, one string or a list of them.

    Raises:
        BadRequestError: something else, or bytes that are no image.
    """
    if image_data is None:
        return ()
    entries = image_data if isinstance(image_data, list) else [image_data]
    return tuple(_read_image(entry) for entry in entries)


def undecodable(why: str) -> BadRequestError:
    """The refusal of an image."""
    return BadRequestError({"message": f"Could not decode image: {why}"})


def _read_image(entry: Any) -> bytes:
    if not isinstance(entry, str) or entry.startswith(("http://", "https://", "file://")):
        raise undecodable("only data URIs and base64 are taken")
    encoded = entry.partition(",")[2] if entry.startswith("data:") else entry
    try:
        image = base64.b64decode(encoded, validate=True)
    except ValueError as error:  # binascii's error is one
        raise undecodable(str(error)) from error
    if image_size(image) is None:
        raise undecodable("these bytes are no picture")
    return image
