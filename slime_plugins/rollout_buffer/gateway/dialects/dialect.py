"""Pure: the dialects in which agents ask for turns. All are read as chat requests, and encode the same replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.gateway import replies
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody
from slime_plugins.rollout_buffer.gateway.dialects import anthropic_messages
from slime_plugins.rollout_buffer.gateway.replies import ChatReply
from slime_plugins.rollout_buffer.types import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """Functions that convert the requests of one API to chat requests and images, and encode its replies, the events of
    streamed replies, and errors."""

    read: Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], Mapping[str, Image]]]
    encode: Callable[[ChatReply], dict[str, Any]]
    events: Callable[[ChatReply, ChatBody], Iterable[bytes]]
    error: Callable[[RolloutBufferError], dict[str, Any]]
    error_events: Callable[[RolloutBufferError], Iterable[bytes]]


CHAT_COMPLETIONS = Dialect(
    read=lambda body: (body, {}),
    encode=replies.completion,
    events=lambda reply, asked: replies.events(reply, include_usage=asked.includes_usage),
    error=replies.error_body,
    error_events=lambda error: [replies.server_sent_event(replies.error_body(error)), replies.DONE],
)
MESSAGES = Dialect(
    read=anthropic_messages.read_request,
    encode=anthropic_messages.message,
    events=lambda reply, asked: anthropic_messages.events(reply),
    error=anthropic_messages.error_body,
    error_events=lambda error: [replies.named_event("error", anthropic_messages.error_body(error))],
)


def dialect_of(path: str) -> Dialect | None:
    """Returns the dialect of a route; None for the routes of programs that run agents."""
    if path.endswith(("/messages", "/messages/count_tokens")):
        return MESSAGES
    if path.startswith("/v1/") or path.endswith(("/chat/completions", "/models")):
        return CHAT_COMPLETIONS
    return None
