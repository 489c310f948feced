"""Pure: encodes replies in OpenAI's format: completions, stream chunks, models, errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.errors import EpisodeError, RolloutBufferError

DONE = b"data: [DONE]\n\n"
CHUNK_CHARACTERS = 400
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """One answered turn. ``message`` is in OpenAI's format; ``stop`` is the stop sequence that ended its text;
    ``log_probs`` is None unless requested."""

    name: str
    created: int
    model: str
    message: Mapping[str, Any]
    finish_reason: str
    usage: Mapping[str, Any]
    weight_version: str | None
    stop: str | None = None
    log_probs: Sequence[Mapping[str, Any]] | None = None


def completion(reply: ChatReply) -> dict[str, Any]:
    """Encodes a reply that is not streamed."""
    return {
        "id": f"chatcmpl-{reply.name}",
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "message": dict(reply.message),
                "finish_reason": reply.finish_reason,
                "logprobs": None if reply.log_probs is None else {"content": list(reply.log_probs)},
            }
        ],
        "usage": dict(reply.usage),
        "metadata": {"weight_version": reply.weight_version},
    }


def events(reply: ChatReply, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the events of a streamed reply; ``body`` is the request."""
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    yield from map(server_sent_event, _chunks(reply, include_usage=include_usage))
    yield DONE


def _chunks(reply: ChatReply, *, include_usage: bool) -> Iterator[dict[str, Any]]:
    message = reply.message
    yield _chunk(reply, {"role": "assistant", "content": ""}, include_usage=include_usage)
    if message.get("reasoning_content"):
        yield _chunk(reply, {"reasoning_content": message["reasoning_content"]}, include_usage=include_usage)
    log_probs = reply.log_probs
    text = message.get("content") or ""
    for at in range(0, len(text), CHUNK_CHARACTERS):
        yield _chunk(
            reply, {"content": text[at : at + CHUNK_CHARACTERS]}, include_usage=include_usage, log_probs=log_probs
        )
        log_probs = None  # all in the first chunk: chunks do not end at token boundaries
    for index, call in enumerate(message.get("tool_calls") or []):
        yield _chunk(reply, {"tool_calls": [{"index": index, **call}]}, include_usage=include_usage)
    yield _chunk(reply, {}, include_usage=include_usage, log_probs=log_probs, finish_reason=reply.finish_reason)
    if include_usage:
        yield {**_frame(reply), "choices": [], "usage": dict(reply.usage)}


def _chunk(
    reply: ChatReply,
    delta: Mapping[str, Any],
    *,
    include_usage: bool,
    log_probs: Sequence[Mapping[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": dict(delta), "finish_reason": finish_reason, "logprobs": None}
    if log_probs is not None:
        choice["logprobs"] = {"content": list(log_probs)}
    body = {**_frame(reply), "choices": [choice]}
    return {**body, "usage": None} if include_usage else body


def _frame(reply: ChatReply) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.name}",
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
        "metadata": {"weight_version": reply.weight_version},
    }


def server_sent_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + server_sent_event(body)


def model_list(names: Sequence[str], created: int) -> dict[str, Any]:
    """Encodes ``/v1/models``."""
    cards = [{"id": name, "object": "model", "created": created, "owned_by": "rollout-buffer"} for name in names]
    return {"object": "list", "data": cards}


def error_body(error: RolloutBufferError) -> dict[str, Any]:
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.detail.get("param")
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def status_of(error: RolloutBufferError) -> int:
    """Returns the HTTP status of an error: 400 if the engine refused the request, 503 if it is unreachable."""
    if isinstance(error, EpisodeError):
        status = error.detail.get("status")
        return 400 if isinstance(status, int) and 400 <= status < 500 else 503
    return error.http_status
