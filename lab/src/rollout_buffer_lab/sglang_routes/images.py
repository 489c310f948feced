"""Decodes the images of a request, and checks that they are images."""

from __future__ import annotations

import base64
from typing import Any

from rollout_buffer_lab.sglang_routes.sampling import BadRequestError
from slime_plugins.rollout_buffer.engine.image_token_counts import image_size


def read_images(image_data: Any) -> tuple[bytes, ...]:
    """Returns the image files in a request's ``image_data``: a data URI or bare base64, or a list of such strings.

    Raises:
        BadRequestError: an entry is neither, or its bytes are no image.
    """
    if image_data is None:
        return ()
    entries = image_data if isinstance(image_data, list) else [image_data]
    return tuple(_read_image(entry) for entry in entries)


def undecodable(why: str) -> BadRequestError:
    """Returns the error that refuses an image."""
    return BadRequestError({"message": f"Could not decode image: {why}"})


def _read_image(entry: Any) -> bytes:
    if not isinstance(entry, str) or entry.startswith(("http://", "https://", "file://")):
        raise undecodable("only data URIs and base64 are taken")
    encoded = entry.partition(",")[2] if entry.startswith("data:") else entry
    try:
        image = base64.b64decode(encoded, validate=True)
    except ValueError as error:  # also binascii.Error, a subclass
        raise undecodable(str(error)) from error
    if image_size(image) is None:
        raise undecodable("these bytes are no picture")
    return image
