"""The dialects in which agents ask for turns. Each reads requests as chat requests and encodes chat replies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.gateway.dialects import anthropic_messages, chat_completions, openai_responses
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, Piece
from slime_plugins.rollout_buffer.types import Image, Message

Body = Mapping[str, Any]


class ReplyEvents(Protocol):
    """Encodes one reply as server-sent events."""

    def begin(self, reply: ChatReply) -> Iterable[bytes]:
        """Returns the events that begin the reply."""

    def add(self, piece: Piece) -> Iterable[bytes]:
        """Returns the events of the reply's next piece."""

    def end(self, reply: ChatReply) -> Iterable[bytes]:
        """Returns the events that end the reply."""

    def fail(self, error: RolloutBufferError) -> Iterable[bytes]:
        """Returns the events that end a stream with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """Functions that convert the requests of one API to chat requests and images, and encode its replies and errors.

    ``read`` returns a request as the body of a chat request, and the images that ``extract_images`` did not take out
    of it. Its second argument has the messages of the turn that ``previous_turn`` names by session and turn name.
    ``encode`` encodes the reply to a request, ``events`` makes the encoder of a streamed reply. ``client_names`` are
    the dialect's own names of fields, by the names of chat requests, where the two differ.
    """

    read: Callable[[Body, Sequence[Message]], tuple[Body, Mapping[str, Image]]]
    previous_turn: Callable[[Body], tuple[str, str] | None] = lambda body: None
    encode: Callable[[ChatReply, Body], dict[str, Any]]
    events: Callable[[Body], ReplyEvents]
    error: Callable[[RolloutBufferError], dict[str, Any]]
    client_names: Mapping[str, str] = field(default_factory=dict)


CHAT_COMPLETIONS = Dialect(
    read=lambda body, history: (body, {}),
    encode=lambda reply, body: chat_completions.completion(reply),
    events=chat_completions.ChatEvents,
    error=chat_completions.error_body,
)
RESPONSES = Dialect(
    read=openai_responses.read_request,
    previous_turn=openai_responses.read_response_id,
    encode=openai_responses.response,
    events=openai_responses.ResponseEvents,
    error=chat_completions.error_body,
    client_names={"max_tokens": "max_output_tokens", "response_format": "text.format"},
)
MESSAGES = Dialect(
    read=lambda body, history: anthropic_messages.read_request(body),
    encode=lambda reply, body: anthropic_messages.message(reply),
    events=lambda body: anthropic_messages.MessageEvents(),
    error=anthropic_messages.error_body,
    client_names={"stop": "stop_sequences", "response_format": "output_config.format"},
)


def dialect_of(path: str) -> Dialect | None:
    """Returns the dialect of a route; None for the routes of programs that run agents."""
    if path.endswith("/messages") or "/messages/" in path:  # also /messages/count_tokens
        return MESSAGES
    if path.endswith("/responses"):
        return RESPONSES
    if path.startswith("/v1/") or path.endswith(("/chat/completions", "/models")):
        return CHAT_COMPLETIONS
    return None
