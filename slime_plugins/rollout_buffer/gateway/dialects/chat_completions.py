"""Encodes replies in OpenAI's format: completions, stream chunks, models, errors. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.errors import EpisodeError, RolloutBufferError
from slime_plugins.rollout_buffer.recording.messages import with_string_arguments
from slime_plugins.rollout_buffer.types import Message

CONTENT, REASONING, TOOL_CALLS = "content", "reasoning_content", "tool_calls"
DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """The reply of one turn. At the beginning of a streamed reply its message is empty.

    ``stop`` is the stop sequence that ended the text; ``log_probs`` is None unless requested.
    """

    name: str
    created: int
    model: str
    message: Message
    finish_reason: str
    usage: Mapping[str, Any]
    weight_version: str | None
    stop: str | None = None
    log_probs: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The next part of a message: text for the field ``key``. For tool calls this is text of their arguments.

    ``joint`` separates the text from earlier text of the same field that a thought or a call interrupted. A piece with
    ``call_id`` and ``name`` begins a call; other pieces of calls continue the latest call.
    """

    key: str
    text: str
    joint: str = ""
    call_id: str = ""
    name: str = ""


def pieces_of(message: Message) -> list[Piece]:
    """Returns a whole message as pieces."""
    texts = [Piece(key=key, text=message[key]) for key in (REASONING, CONTENT) if message.get(key)]
    calls = [(call["id"], call["function"]) for call in with_string_arguments(message.get(TOOL_CALLS) or [])]
    return texts + [
        Piece(key=TOOL_CALLS, call_id=call_id, name=function["name"], text=function["arguments"])
        for call_id, function in calls
    ]


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
                "message": _encoded_message(reply.message),
                "finish_reason": reply.finish_reason,
                "logprobs": None if reply.log_probs is None else {"content": list(reply.log_probs)},
            }
        ],
        "usage": dict(reply.usage),
        "metadata": {"weight_version": reply.weight_version},
    }


def _encoded_message(message: Message) -> dict[str, Any]:
    calls = message.get(TOOL_CALLS)
    if not calls:
        return dict(message)
    return {**message, CONTENT: message[CONTENT] or None, TOOL_CALLS: with_string_arguments(calls)}


class ChatEvents:
    """The events of a streamed reply. ``begin``, ``add``, ``end`` and ``fail`` yield them; ``body`` is the request."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._includes_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._num_calls = 0

    def begin(self, reply: ChatReply) -> Iterator[bytes]:
        self._begun = reply
        yield self._chunk(reply, {"role": "assistant", "content": ""})

    def add(self, piece: Piece) -> Iterator[bytes]:
        if piece.key != TOOL_CALLS:
            yield self._chunk(self._begun, {piece.key: piece.joint + piece.text})
            return
        if piece.call_id:
            self._num_calls += 1
            function = {"name": piece.name, "arguments": ""}
            yield self._call({"id": piece.call_id, "type": "function", "function": function})
        yield self._call({"function": {"arguments": piece.text}})

    def _call(self, delta: Mapping[str, Any]) -> bytes:
        # The latest call has the last index.
        return self._chunk(self._begun, {"tool_calls": [{"index": self._num_calls - 1, **delta}]})

    def end(self, reply: ChatReply) -> Iterator[bytes]:
        yield self._chunk(reply, {}, log_probs=reply.log_probs, finish_reason=reply.finish_reason)
        if self._includes_usage:
            yield server_sent_event({**_frame(reply), "choices": [], "usage": dict(reply.usage)})
        yield DONE

    def fail(self, error: RolloutBufferError) -> Iterator[bytes]:
        yield server_sent_event(error_body(error))
        yield DONE

    def _chunk(
        self,
        reply: ChatReply,
        delta: Mapping[str, Any],
        *,
        log_probs: Sequence[Mapping[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": dict(delta), "finish_reason": finish_reason, "logprobs": None}
        if log_probs is not None:
            choice["logprobs"] = {"content": list(log_probs)}
        usage = {"usage": None} if self._includes_usage else {}
        return server_sent_event({**_frame(reply), "choices": [choice], **usage})


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


def model_list(name: str) -> dict[str, Any]:
    """Encodes ``/v1/models``, which has one model."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "rollout-buffer"}]}


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
