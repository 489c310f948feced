"""Replies as the gateway converts them, of a model whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody
from slime_plugins.rollout_buffer.gateway.replies import ChatReply
from slime_plugins.rollout_buffer.gateway.reply_stream import Listener, ReplyStream
from slime_plugins.rollout_buffer.types import Message

END_OF_TURN = 256
BEGUN = ChatReply(name="a", created=0, model="m", message={}, finish_reason="", usage={}, weight_version=None)


class ByteTokens:
    """What the conversion takes of ``ChatTokens``."""

    def is_closed(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] == END_OF_TURN

    def text(self, ids: Sequence[int]) -> str:
        return self.decoded(ids[:-1] if self.is_closed(ids) else ids)

    def decoded(self, ids: Sequence[int]) -> str:
        pieces = b"".join(b"<end>" if one == END_OF_TURN else bytes([one]) for one in ids)
        return pieces.decode(errors="replace")


def reply_stream(prompt: str = "", tell: Listener | None = None, **body: Any) -> ReplyStream:
    tokens: Any = ByteTokens()
    return ReplyStream(tokens, ChatBody(**body), list(prompt.encode()), BEGUN, tell, name="0")


def gateway_message(text: str, prompt: str = "", **body: Any) -> Message:
    """The message of a reply that came whole."""
    return reply_stream(prompt, **body).end([*text.encode(), END_OF_TURN])
