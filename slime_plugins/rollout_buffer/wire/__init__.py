"""The only speller of JSON keys of items: records on one side, what goes over HTTP and is stored on the other.

Each wire type is one class of pydantic, which decodes it, checks it and describes it in OpenAPI. What is wrong is an
``InvalidPayloadError`` whose sentence names the key, what is allowed there, and what a misspelt key may have meant.
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
from slime_plugins.rollout_buffer.wire.replies import (
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
