"""What goes over HTTP, each type as one class: items, requests, replies. OpenAPI describes these classes.

* items: ``items`` (as delivered), ``written_items``, ``generations``, ``images``; ``checks`` has their base class
* requests: ``start_request`` and its ``job_settings``, ``poll_requests`` (poll, ack), ``control_requests`` (drain, sign
  in), ``trainer_reports``, ``query_params``; ``request_fields`` has their base class
* replies: ``delivery_replies``, ``job_replies``, ``group_replies``, ``trajectory_replies``, as the server builds them;
  ``trainer_replies`` as the client reads them
* ``inline_images``: screenshots, cut out of a body before its JSON is parsed

A wrong value raises an ``InvalidPayloadError`` whose message names the key, the allowed values, and for a misspelt key
the key that it resembles. Replies are typed dictionaries: mypy checks their keys, and they are not validated when they
are sent.
"""

from slime_plugins.rollout_buffer.wire.checks import MAX_ITEMS as MAX_ITEMS
from slime_plugins.rollout_buffer.wire.checks import identifier as identifier
from slime_plugins.rollout_buffer.wire.generations import decode_generations as decode_generations
from slime_plugins.rollout_buffer.wire.generations import encode_generations as encode_generations
from slime_plugins.rollout_buffer.wire.generations import record_hashes as record_hashes
from slime_plugins.rollout_buffer.wire.images import IMAGE_URL_PREFIX as IMAGE_URL_PREFIX
from slime_plugins.rollout_buffer.wire.images import RECORDS_TYPE as RECORDS_TYPE
from slime_plugins.rollout_buffer.wire.images import ImageSpot as ImageSpot
from slime_plugins.rollout_buffer.wire.images import decode_data_uri as decode_data_uri
from slime_plugins.rollout_buffer.wire.images import encode_data_uri as encode_data_uri
from slime_plugins.rollout_buffer.wire.images import image_hashes as image_hashes
from slime_plugins.rollout_buffer.wire.images import image_media_type as image_media_type
from slime_plugins.rollout_buffer.wire.images import image_spots as image_spots
from slime_plugins.rollout_buffer.wire.images import is_sha256 as is_sha256
from slime_plugins.rollout_buffer.wire.images import may_have_screenshots as may_have_screenshots
from slime_plugins.rollout_buffer.wire.items import TurnRewards as TurnRewards
from slime_plugins.rollout_buffer.wire.items import checked_turn_rewards as checked_turn_rewards
from slime_plugins.rollout_buffer.wire.items import trained_turns as trained_turns
from slime_plugins.rollout_buffer.wire.trainer_replies import InvalidReplyError as InvalidReplyError
from slime_plugins.rollout_buffer.wire.trainer_replies import RolloutData as RolloutData
from slime_plugins.rollout_buffer.wire.trainer_replies import RolloutItem as RolloutItem
from slime_plugins.rollout_buffer.wire.trainer_replies import StartReply as StartReply
from slime_plugins.rollout_buffer.wire.trainer_replies import decode_error as decode_error
from slime_plugins.rollout_buffer.wire.trainer_replies import decode_item as decode_item
from slime_plugins.rollout_buffer.wire.trainer_replies import decode_rollout_data as decode_rollout_data
from slime_plugins.rollout_buffer.wire.trainer_replies import decode_start_reply as decode_start_reply
from slime_plugins.rollout_buffer.wire.trainer_replies import encode_error as encode_error
