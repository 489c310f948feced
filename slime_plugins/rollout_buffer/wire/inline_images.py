"""Takes inline screenshots out of a request before it is parsed, and leaves their hashes in their place.

A written episode is nearly all base64. This text is cut out of the raw bytes, so that it never becomes a Python string
and the JSON that remains to be parsed is small. Only certain image URLs are cut out: ``"url": "data:image/...`` with
quotes that are not escaped, and so are not part of a JSON string. The parser handles all others.
"""

from __future__ import annotations

import binascii
import re

import pybase64

from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire import IMAGE_URL_PREFIX, image_media_type

_USUAL_KEYS = (b'"url": ', b'"url":')
_KEY_BEFORE = re.compile(rb'"url"[ \t\r\n]*:[ \t\r\n]*\Z')
_KEY_SPAN = 32
"""Number of bytes before a string in which its key is searched."""
_HEAD = re.compile(rb"data:(image/(?:png|jpeg|webp));base64,")


def extract_images(content: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, Image]]:
    """Returns the JSON with hashes where whole, valid screenshots stood, and these screenshots by hash."""
    images: dict[str, Image] = {}
    pieces: list[bytes | bytearray] = []
    copied = searched = 0
    while (opens := content.find(b'"data:image/', searched)) >= 0:
        closes = content.find(b'"', opens + 1)
        if closes < 0:
            break
        searched = closes
        image = _image_at(content, opens, closes)
        if image is not None:
            images[image.sha256] = image
            pieces += (content[copied : opens + 1], IMAGE_URL_PREFIX.encode(), image.sha256.encode())
            copied = closes
    rest = content[copied:]
    return (b"".join([*pieces, rest]) if pieces else rest), images


def _image_at(content: bytes | bytearray, start: int, end: int) -> Image | None:
    """Returns the image in the string with quotes at ``start`` and ``end``; None if it is no whole, valid image."""
    head = _HEAD.match(content, start + 1, end)
    if head is None or not _is_url(content, start):
        return None
    try:
        data = pybase64.b64decode(memoryview(content)[head.end() : end], validate=True)
    except binascii.Error:
        return None
    media_type = head[1].decode()
    return Image(data=data, media_type=media_type) if image_media_type(data) == media_type else None


def _is_url(content: bytes | bytearray, start: int) -> bool:
    """Returns True if the string that starts there has the key ``url``."""
    if content.endswith(_USUAL_KEYS, 0, start):
        return True
    return _KEY_BEFORE.search(content[max(0, start - _KEY_SPAN) : start]) is not None
