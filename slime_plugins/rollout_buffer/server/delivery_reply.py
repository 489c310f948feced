"""Encodes a delivery as JSON, item by item: for a poll, or for ``rollout-buffer replay`` (``GET /deliveries/ID``)."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.server.http import Part
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.reward_versions import Scores, rescored
from slime_plugins.rollout_buffer.wire.delivery_replies import Acknowledged, MetaInfo, ShortGroup
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload

CHUNK_BYTES = 512 * 1024
"""Approximate size of a part of the reply."""


def delivery_chunks(
    buffer: Buffer,
    delivery: Delivery,
    poll: PollPayload,
    acknowledged: Acknowledged | None,
    *,
    reward_version: int = 0,
    scores: Scores | None = None,
) -> Iterator[Part]:
    """Yields the reply item by item; stored payloads are copied without parsing, and never held all at once.

    ``scores`` are the rewards of another reward version. ``meta_info`` comes last: for a poll that takes no dummies,
    the short groups are known only after all members were read.
    """
    meta_info: MetaInfo = {**delivery.meta_info, "reward_version": reward_version}
    if acknowledged is not None:
        meta_info["acknowledged"] = acknowledged
    head = orjson.dumps({"success": True, "message": "groups delivered"})[:-1]
    pieces: list[bytes | memoryview] = [head, b',"data":{"data":[']
    separator, size = b"", 0
    short_groups: list[ShortGroup] = []
    inline_images = poll.images == "inline"
    if poll.takes_dummies:
        members = buffer.delivered_pieces(delivery, inline_images=inline_images)
    else:
        members = buffer.played_pieces(delivery, short_groups, inline_images=inline_images)
    if scores is not None:
        members = rescored(members, scores)
    for entry, body in members:
        item: list[bytes | memoryview] = [separator, orjson.dumps(entry)[:-1], b",", memoryview(body[0])[1:], *body[1:]]
        for piece in item:
            pieces.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                yield pieces
                pieces, size = [], 0
        separator = b","
    if short_groups:
        meta_info["short_groups"] = short_groups
    yield [*pieces, b'],"meta_info":', orjson.dumps(meta_info), b"}}"]
