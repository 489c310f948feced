"""What goes over HTTP, each type as one class: items, requests, replies. OpenAPI describes these classes.

* items: ``items`` (keys of an item), ``generations``, ``images``; ``checks`` has their base class
* requests: ``start_request`` and its ``job_settings``, ``poll_requests`` (poll, ack), ``control_requests`` (drain, sign
  in), ``trainer_reports``, ``query_params``; ``request_fields`` has their base class
* replies: ``delivery_replies``, ``job_replies``, ``group_replies``, ``trajectory_replies``, as the server builds them;
  ``trainer_replies`` as the client reads them
* ``inline_images``: screenshots, cut out of a body before its JSON is parsed

What is wrong is an ``InvalidPayloadError`` whose sentence names the key, what is allowed there, and what a misspelt key
may have meant. Replies are typed dictionaries: mypy checks their keys, and nothing is validated while one is sent.
"""

from slime_plugins.rollout_buffer.wire.checks import MAX_IDENTIFIER, MAX_ITEMS, identifier
from slime_plugins.rollout_buffer.wire.generations import (
    common_prefix_length,
    decode_generations,
    encode_generations,
    named_records,
    record_hashes,
)
from slime_plugins.rollout_buffer.wire.images import (
    IMAGE_URL_PREFIX,
    RECORDS_TYPE,
    ImageSpot,
    decode_data_uri,
    encode_data_uri,
    image_hashes,
    image_media_type,
    image_spots,
    is_sha256,
    shows_images,
)
from slime_plugins.rollout_buffer.wire.items import (
    TurnRewards,
    WrittenItem,
    check_messages,
    checked_turn_rewards,
    decode_written_item,
    encode_body,
    encode_turn_rewards,
    trained_turns,
)
from slime_plugins.rollout_buffer.wire.trainer_replies import (
    RolloutData,
    RolloutItem,
    StartReply,
    decode_error,
    decode_item,
    decode_rollout_data,
    decode_start_reply,
    encode_error,
)

__all__ = [
    "IMAGE_URL_PREFIX",
    "MAX_IDENTIFIER",
    "MAX_ITEMS",
    "RECORDS_TYPE",
    "ImageSpot",
    "RolloutData",
    "RolloutItem",
    "StartReply",
    "TurnRewards",
    "WrittenItem",
    "check_messages",
    "checked_turn_rewards",
    "common_prefix_length",
    "decode_data_uri",
    "decode_error",
    "decode_generations",
    "decode_item",
    "decode_rollout_data",
    "decode_start_reply",
    "decode_written_item",
    "encode_body",
    "encode_data_uri",
    "encode_error",
    "encode_generations",
    "encode_turn_rewards",
    "identifier",
    "image_hashes",
    "image_media_type",
    "image_spots",
    "is_sha256",
    "named_records",
    "record_hashes",
    "shows_images",
    "trained_turns",
]
