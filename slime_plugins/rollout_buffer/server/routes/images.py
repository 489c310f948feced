"""Routes of images and token records, stored by the hash of their bytes."""

from __future__ import annotations

from flask import Response

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.openapi.operations import IMAGE_TYPES, ref, text
from slime_plugins.rollout_buffer.server.http import json_reply, read_bytes, the_buffer
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire import RECORDS_TYPE
from slime_plugins.rollout_buffer.wire.delivery_replies import ImageReply

routes = Routes("images")


@routes.get(
    "/images/{sha256}",
    reply=text(format="binary"),
    content_types=(*IMAGE_TYPES, RECORDS_TYPE, "application/octet-stream"),
    errors=(500,),
)
def get_image(sha256: str) -> Response:
    """Read a screenshot.

    Returns the bytes that the engine received, or token records of a generation.
    """
    data = the_buffer().payloads.image(sha256)
    response = Response(data, mimetype=wire.image_media_type(data) or "application/octet-stream")
    response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


@routes.put(
    "/images/{sha256}",
    body=text(format="binary"),
    reply=ImageReply,
    body_types=(*IMAGE_TYPES, RECORDS_TYPE),
    other_replies={201: ("It is durable now.", ref("ImageReply"))},
)
def put_image(sha256: str) -> Response:
    """Store a screenshot.

    Writers name it in messages as `sha256:HASH`, or token records in `records` of a generation. Repeating it
    changes nothing.
    """
    data = read_bytes()
    media_type = wire.image_media_type(data)
    if media_type is None:
        raise InvalidPayloadError("the body must be the bytes of a PNG, JPEG or WebP image, or token records")
    image = Image(data=data, media_type=media_type)
    if image.sha256 != sha256:
        raise InvalidPayloadError(f"the body hashes to {image.sha256}, not to the {sha256[:80]!r} of its path")
    created = the_buffer().payloads.store_image(image)
    return json_reply(ImageReply(sha256=sha256, created=created), 201 if created else 200)
