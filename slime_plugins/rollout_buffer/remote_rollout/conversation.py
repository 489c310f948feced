"""Renders messages of the trainer or the rollout server as prompt ids; compares replies regardless of their form."""

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
    """How the prompt of a turn after the first is made, and thereby how the tokens that the server added are counted.

    Both methods give the same count, unless the tokenizer would encode the sampled text to other ids.
    """

    IDS = "ids"  # the ids of the sequence so far, and the template's ids of the new messages
    TEXT = "text"  # the whole conversation rendered again


def prompt_by_text(tokens: ChatTokens, messages: Sequence[Message], tools: Tools) -> list[int]:
    """Returns the ids of the messages as the template renders them. Messages that it refuses are normalised first.

    Raises:
        InvalidPayloadError: the template refuses the normalised messages, too.
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
    """Returns True if two messages are the same reply, regardless of their form."""
    if left == right:
        return True
    left, right = read_conversation([left, right]).messages
    return left["role"] == right["role"] and reply_key(left) == reply_key(right)
