"""Messages as either side of the protocol may send them: rendered as they came, and compared without their form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from slime.utils.mask_template import with_reasoning_content
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.errors import ConfigError, InvalidPayloadError
from slime_plugins.rollout_buffer.recording.messages import digest, read_conversation
from slime_plugins.rollout_buffer.types import Message

Tools = Sequence[Mapping[str, Any]]


class CountMethod(StrEnum):
    """How a prompt is made after the first turn, and so how the tokens that entered are counted.

    Both give the same, unless the tokenizer would encode the sampled text to other ids.
    """

    IDS = "ids"  # the held ids, and a bridge
    TEXT = "text"  # the whole conversation rendered again


def prompt_by_text(tokens: ChatTokens, messages: Sequence[Message], tools: Tools) -> list[int]:
    """Returns the ids of messages as the template renders them: as they came or, if it refuses that, normalised.

    Raises:
        InvalidPayloadError: the template refuses both.
    """
    try:
        return tokens.prompt([dict(with_reasoning_content(message)) for message in messages], tools)
    except ConfigError as error:
        try:
            return tokens.prompt(read_conversation(list(messages)).messages, tools)
        except ConfigError:
            raise InvalidPayloadError(error.message) from error


def reply_key(message: Message) -> bytes:
    """Returns a digest of a normalised reply: of its text without surrounding spaces, and its calls without ids."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return digest([message["content"].strip(), calls])


def is_same_reply(left: Message, right: Message) -> bool:
    """Returns True if two messages are the same reply, apart from their form."""
    if left == right:
        return True
    one, other = read_conversation([left, right]).messages
    return one["role"] == other["role"] and reply_key(one) == reply_key(other)
