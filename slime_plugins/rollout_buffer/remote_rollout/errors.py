"""Errors of the remote rollout protocol, in the project's error tree."""

from __future__ import annotations

from slime_plugins.rollout_buffer.errors import ConflictError, InvalidPayloadError, RequestError, RolloutBufferError


class WrongMaskError(RequestError):
    """The ``response_mask`` of a call is not one 0 for each entered token; nothing was sampled."""

    code = "wrong_response_mask"
    http_status = 422


class CallbackRefusedError(RequestError):
    """The ``server_url`` is not on the list of callback hosts."""

    code = "callback_refused"
    http_status = 403


class TokenizerRefusedError(InvalidPayloadError):
    """The named tokenizer is unknown, or must not be loaded."""

    code = "unknown_tokenizer"


class RolloutConflictError(ConflictError):
    """The same ``rollout_id`` has another request, or its turns are out of order."""

    code = "rollout_conflict"


class SessionEndedError(ConflictError):
    """The session of this ``rollout_id`` has ended or expired; it accepts no more turns."""

    code = "session_ended"


class TrainerReplyError(RolloutBufferError):
    """The trainer did not answer, refused, or sent ids that differ from our count; the rollout ends with an error."""

    code = "trainer_reply"
    http_status = 502
