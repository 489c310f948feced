"""Parses a trainer's reply to a turn. Pure.

The guide's form has ``token_ids``, ``prompt_token_ids`` and ``logprobs`` next to ``choices``; other trainers put them
into the choice, or the log-probs into OpenAI's ``logprobs.content``. All forms are accepted; token ids are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from slime_plugins.rollout_buffer.remote_rollout.errors import TrainerReplyError
from slime_plugins.rollout_buffer.rules.validity import checked_log_prob, first_invalid_id
from slime_plugins.rollout_buffer.types import Message

_TOKEN_IDS = ("token_ids", "output_ids", "response_ids", "completion_token_ids")
_PROMPT_IDS = ("prompt_token_ids", "prompt_ids")
_LOG_PROBS = ("logprobs", "log_probs", "token_logprobs", "output_log_probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerReply:
    """One sampled turn. ``prompt_ids`` and ``prompt_tokens`` are None if the trainer does not report them.

    ``body`` is the whole reply.
    """

    message: Message
    finish_reason: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    log_probs: tuple[float, ...] | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


def read_reply(body: bytes, turn: int) -> TrainerReply:
    """Returns the turn in a trainer's HTTP 200.

    Raises:
        TrainerReplyError: the reply is not JSON, has no message or token ids, or inconsistent lengths; names the turn.
    """
    reply = _object(body, turn)
    choice = _choice(reply, turn)
    token_ids = _ids(_first(_TOKEN_IDS, reply, choice), turn, "token_ids")
    if token_ids is None:
        raise TrainerReplyError(f"turn {turn}: the trainer's reply has no token_ids")
    if not token_ids:
        raise TrainerReplyError(f"turn {turn}: the trainer's reply has an empty list of token_ids")
    usage = reply.get("usage")
    reported = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return TrainerReply(
        message=_message(choice, turn),
        finish_reason=str(choice.get("finish_reason") or "stop"),
        token_ids=token_ids,
        prompt_ids=_ids(_first(_PROMPT_IDS, reply, choice), turn, "prompt_token_ids"),
        prompt_tokens=reported if type(reported) is int else None,
        log_probs=_log_probs(_first(_LOG_PROBS, reply, choice), len(token_ids), turn),
        body=reply,
    )


def sentence_of(body: bytes) -> str:
    """Returns the message of an error reply, in any of the usual forms, shortened."""
    try:
        reply: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        reply = body[:500].decode("utf-8", "replace").strip()
    for _ in range(3):  # the text may be nested, as in {"error": {"message": …}}
        if isinstance(reply, dict):
            reply = next((reply[key] for key in ("error", "message", "detail") if reply.get(key)), str(reply))
    return str(reply)[:500] or "(no text)"


def _object(body: bytes, turn: int) -> dict[str, Any]:
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TrainerReplyError(f"turn {turn}: the trainer's reply is not JSON: {error}") from error
    if not isinstance(reply, dict):
        raise TrainerReplyError(f"turn {turn}: the trainer's reply is not one JSON object")
    return reply


def _choice(reply: Mapping[str, Any], turn: int) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise TrainerReplyError(f"turn {turn}: the trainer's reply must have choices with exactly one entry")
    return choices[0]


def _message(choice: Mapping[str, Any], turn: int) -> Message:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise TrainerReplyError(f"turn {turn}: the trainer's reply has no message")
    if message.get("role", "assistant") != "assistant" or not isinstance(message.get("content"), str | list | None):
        raise TrainerReplyError(f"turn {turn}: the trainer's message is not an assistant's text")
    fields = {key: value for key, value in message.items() if value is not None}
    return {**fields, "role": "assistant", "content": message.get("content")}


def _first(keys: tuple[str, ...], reply: Mapping[str, Any], choice: Mapping[str, Any]) -> Any:
    """Returns the value of the first key that the reply, its choice or its message has; None without any."""
    message = choice.get("message")
    holders = (reply, choice, message if isinstance(message, dict) else {})
    return next((holder[key] for holder in holders for key in keys if holder.get(key) is not None), None)


def _ids(value: Any, turn: int, name: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise TrainerReplyError(f"turn {turn}: {name} must be a list of token ids")
    invalid = first_invalid_id(value, None)
    if invalid is not None:
        raise TrainerReplyError(f"turn {turn}: {name} holds {invalid}, which no vocabulary has")
    return tuple(value)


def _log_probs(value: Any, sampled: int, turn: int) -> tuple[float, ...] | None:
    if isinstance(value, dict):
        value = value.get("content") if value.get("content") is not None else value.get("token_logprobs")
    if value is None:
        return None
    if not isinstance(value, list):
        raise TrainerReplyError(f"turn {turn}: the log-probs must be a list")
    if len(value) != sampled:
        raise TrainerReplyError(
            f"turn {turn}: the trainer sent {sampled} token_ids and {len(value)} log-probs: the lengths must match"
        )
    return tuple(_log_prob(entry, turn, place) for place, entry in enumerate(value))


def _log_prob(entry: Any, turn: int, place: int) -> float:
    log_prob = checked_log_prob(entry.get("logprob") if isinstance(entry, dict) else entry)
    if log_prob is None:
        raise TrainerReplyError(f"turn {turn}: the log-prob of sampled token {place} is no finite number of at most 0")
    return log_prob
