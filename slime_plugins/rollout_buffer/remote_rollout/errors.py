"""What either side of the remote rollout protocol refuses: members of the project's error tree, each with its code."""

from __future__ import annotations

from slime_plugins.rollout_buffer.errors import ConflictError, InvalidPayloadError, RequestError, RolloutBufferError


class WrongMaskError(RequestError):
    """The ``response_mask`` of a call is not one 0 for each token that entered; nothing was sampled."""

    code = "wrong_response_mask"
    http_status = 422


class CallbackRefusedError(RequestError):
    """The ``server_url`` is not on the list of hosts that this server calls."""

    code = "callback_refused"
    http_status = 403


class TokenizerRefusedError(InvalidPayloadError):
    """The tokenizer that was named is not there, or must not be loaded."""

    code = "unknown_tokenizer"


class RolloutConflictError(ConflictError):
    """The same ``rollout_id`` came with other work, or its turns came out of order."""

    code = "rollout_conflict"


class SessionEndedError(ConflictError):
    """The session of this ``rollout_id`` was ended, or expired; it takes no more turns."""

    code = "session_ended"


class TrainerReplyError(RolloutBufferError):
    """The trainer stayed silent, refused, or sent what contradicts our own count. It ends the rollout as an error."""

    code = "trainer_reply"
    http_status = 502
