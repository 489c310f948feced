"""Routes of images and token records, stored by the hash of their bytes."""

from __future__ import annotations

from flask import Blueprint, Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import (
    InvalidPayloadError,
)
from slime_plugins.rollout_buffer.server.http import (
    json_reply,
    read_bytes,
    the_buffer,
)
from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire.delivery_replies import ImageReply

routes = Blueprint("rollout_buffer_images", __name__)


@routes.get("/images/<sha256>")
def get_image(sha256: str) -> Response:
    """Returns a screenshot, exactly the bytes that the engine received, or the token records of a generation."""
    data = the_buffer().contents.image(sha256)
    response = Response(data, mimetype=wire.image_media_type(data) or "application/octet-stream")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


@routes.put("/images/<sha256>")
def put_image(sha256: str) -> Response:
    """Keeps a screenshot or token records under their hash, for writers that name them; again changes nothing."""
    data = read_bytes()
    media_type = wire.image_media_type(data)
    if media_type is None:
        raise InvalidPayloadError("the body must be the bytes of a PNG, JPEG or WebP image, or token records")
    image = Image(data=data, media_type=media_type)
    if image.sha256 != sha256:
        raise InvalidPayloadError(f"the body hashes to {image.sha256}, not to the {sha256[:80]!r} of its path")
    created = the_buffer().contents.store_image(image)
    return json_reply(ImageReply(sha256=sha256, created=created), 201 if created else 200)
