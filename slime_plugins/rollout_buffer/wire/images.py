"""Screenshots on the wire: data URIs, hashes, and their positions in stored payloads."""

from __future__ import annotations

import base64
import re
from typing import Any

from slime.utils.mask_rows import RECORDS_MAGIC
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import Image, Message

IMAGE_URL_PREFIX = "sha256:"
"""A URL of this prefix and a hash names a stored image."""
RECORDS_TYPE = "application/x-token-records"
"""Media type of token records (routed experts, top-p ids), which are stored and fetched like screenshots."""
_DATA_URI = re.compile(r"data:(image/(?:png|jpeg|webp));base64,", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MEDIA_TYPE_BY_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"RIFF", "image/webp"),
    (RECORDS_MAGIC, RECORDS_TYPE),
)
_SHOWS_IMAGE = b'"url":"sha256:'
_STORED_IMAGE = re.compile(rb'"url":"sha256:([0-9a-f]{64})"')

ImageSpot = tuple[int, int, str]
"""A screenshot's URL in a stored payload: its start, its end, and the hash."""


def take_images_out(message: Message, inline: dict[str, Image], hashes: dict[str, None], where: str) -> Message:
    """Returns the message with hashes in place of inline screenshots, which are added to ``inline`` by hash.

    The hashes of all its screenshots are added to ``hashes``, an ordered set.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_take_image_out(part, inline, hashes, where) for part in content]}


def _take_image_out(part: Any, inline: dict[str, Image], hashes: dict[str, None], where: str) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        return part
    image_url = part.get("image_url")
    url = image_url.get("url") if isinstance(image_url, dict) else None
    if not isinstance(url, str):
        return part
    if url.startswith("data:"):
        image = decode_data_uri(url, where)
        inline[image.sha256] = image
        url = IMAGE_URL_PREFIX + image.sha256
        part = {**part, "image_url": {**part["image_url"], "url": url}}
    if url.startswith(IMAGE_URL_PREFIX):
        sha256 = url.removeprefix(IMAGE_URL_PREFIX)
        if not is_sha256(sha256):
            raise InvalidPayloadError(f"{where}: the URL of a stored image is sha256: and 64 lower-case hex digits")
        hashes[sha256] = None
    return part


def decode_data_uri(uri: str, where: str = "image") -> Image:
    """Decodes a ``data:image/...;base64,`` URI.

    Raises:
        InvalidPayloadError: the URI is not base64, or does not hold the PNG, JPEG or WebP that it declares.
    """
    match = _DATA_URI.match(uri)
    if match is None:
        raise InvalidPayloadError(f"{where}: an inline image must be a base64 data URI of a PNG, JPEG or WebP")
    try:
        data = base64.b64decode(uri[match.end() :], validate=True)
    except ValueError as error:  # also for characters that are not ASCII
        raise InvalidPayloadError(f"{where}: the inline image is not valid base64 ({error})") from error
    media_type = image_media_type(data)
    if media_type is None or media_type != match.group(1):
        raise InvalidPayloadError(f"{where}: the inline image says {match[1]} but holds {media_type or 'other bytes'}")
    return Image(data=data, media_type=media_type)


def encode_data_uri(data: bytes) -> str:
    """Returns the bytes of an image as a data URI."""
    media_type = image_media_type(data) or "application/octet-stream"
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def image_media_type(data: bytes) -> str | None:
    """Returns the media type of PNG, JPEG, WebP or token records by the first bytes; None for others."""
    return next((media_type for magic, media_type in _MEDIA_TYPE_BY_MAGIC if data.startswith(magic)), None)


def may_have_screenshots(body: bytes) -> bool:
    """Returns False if a stored payload certainly has no screenshots; a quick test."""
    return _SHOWS_IMAGE in body


def image_spots(body: bytes) -> list[ImageSpot]:
    """Returns the positions of screenshots in a stored payload, in order.

    A message's text cannot contain the pattern, because its quotes are escaped.
    """
    if not may_have_screenshots(body):
        return []
    return [
        (match.start(1) - len(IMAGE_URL_PREFIX), match.end(1), match[1].decode("ascii"))
        for match in _STORED_IMAGE.finditer(body)
    ]


def image_hashes(body: bytes) -> list[str]:
    """Returns the hashes of the screenshots of a stored payload, without repetition."""
    return list(dict.fromkeys(sha256 for _, _, sha256 in image_spots(body)))


def is_sha256(text: str) -> bool:
    """Returns True if the text is a sha256 in lower-case hex."""
    return _SHA256.fullmatch(text) is not None
