"""Builds the token ids of a request: recorded ids are reused, only new messages are rendered.

If the messages begin with a recorded path, the prompt is the ids of that path and a bridge over the new messages.
Otherwise all messages are rendered, which begins a new branch, unless the rendered ids continue a recorded path
exactly.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.errors import ConfigError, InvalidPayloadError
from slime_plugins.rollout_buffer.recording.message_matching import NOTHING, THINK, Difference, Fingerprint, Thinking
from slime_plugins.rollout_buffer.recording.messages import Conversation, image_hashes_of, with_begun_arguments
from slime_plugins.rollout_buffer.recording.turns import Match, Recording, Turn, sampled_in
from slime_plugins.rollout_buffer.types import Message

MAX_INLINE_LENGTH = 20_000
"""In characters; longer messages are rendered in a thread, because rendering them takes milliseconds."""
MAX_OPENING_TOKENS = 8
"""Number of last tokens of a prompt in which ``<think>``, the beginning of a thought, is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The token ids for the engine, and their place in the recording."""

    parent: Turn | None
    ids: list[int]
    images: tuple[str, ...]
    num_held_ids: int
    """Number of leading ids that the path of the parent turn already holds."""
    num_held_images: int
    context: tuple[Fingerprint, ...]
    from_start: bool
    tolerated: frozenset[str] = NOTHING
    difference: Difference | None = None

    def turn(
        self,
        sampled: GenerateReply,
        message: Message,
        chat: ChatTokens,
        *,
        number: int = 0,
        key: bytes,
        request: bytes,
        created: float,
        name: str = "",
        thinks_apart: bool = False,
    ) -> Turn:
        """Returns the turn that was sampled after this prompt; it is not yet recorded.

        ``thinks_apart``: the message has its thoughts in a field of their own, not in its text.
        """
        in_text = Thinking.FROM_START if opens_thought(chat, self.ids) else Thinking.IN_BLOCKS
        return Turn(
            parent=self.parent,
            name=name,
            number=number,
            request=request,
            key=key,
            context=self.context,
            context_ids=array("i", self.ids[self.num_held_ids :]),
            images=self.images[self.num_held_images :],
            sampled=sampled_in(sampled),
            message=message,
            created=created,
            from_start=self.from_start,
            is_closed=chat.is_closed(sampled.output_ids),
            is_unusable=not chat.vision_ids.isdisjoint(sampled.output_ids),
            tolerated=tuple(sorted(self.tolerated)),
            difference=self.difference,
            thinking=Thinking.APART if thinks_apart else in_text,
        )


def opens_thought(chat: ChatTokens, prompt_ids: Sequence[int]) -> bool:
    """Returns True if a prompt ends with the beginning of a thought."""
    return chat.decoded(prompt_ids[-MAX_OPENING_TOKENS:]).rstrip().endswith(THINK)


async def build_prompt(
    recording: Recording, key: bytes, conversation: Conversation, chat: ChatTokens, tools: Sequence[Mapping[str, Any]]
) -> Prompt:
    """Builds the prompt of a request; does not change the recording.

    Raises:
        InvalidPayloadError: the chat template refuses the messages, or they continue a turn that cannot be continued.
    """
    sent = recording.fingerprints(conversation.messages, conversation.digests)
    match = recording.find(key, sent)
    if match.turn is not None:
        prompt = await _continued(match, sent, conversation, chat)
        has_replies = any(message["role"] == "assistant" for message in conversation.messages[match.consumed :])
        if prompt is not None and has_replies:  # the ids may continue a later turn, which messages alone do not show
            deeper = _placed(recording, prompt.ids, prompt.images, sent, match.difference)
            return deeper if deeper.num_held_ids > prompt.num_held_ids else prompt
        if prompt is not None:
            return prompt
    try:
        ids = await _rendered(lambda: _whole_prompt(chat, conversation.messages, tools), conversation.messages)
    except ConfigError as error:
        raise InvalidPayloadError(error.message, {"param": "messages"}) from error
    return prompt_of_ids(recording, ids, conversation, match.difference)


def _whole_prompt(chat: ChatTokens, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Renders all messages. A template that refuses a call with cut arguments gets them parsed as far as they go."""
    try:
        return chat.prompt(messages, tools)
    except ConfigError:
        readable = [
            {**each, "tool_calls": with_begun_arguments(each["tool_calls"])} if each.get("tool_calls") else each
            for each in messages
        ]
        if readable == list(messages):
            raise
        return chat.prompt(readable, tools)


def prompt_of_ids(
    recording: Recording, ids: list[int], conversation: Conversation, difference: Difference | None = None
) -> Prompt:
    """Places a prompt that was rendered as a whole after the longest path that it continues, or on a new branch."""
    images = tuple(image_hashes_of(conversation.messages))
    sent = recording.fingerprints(conversation.messages, conversation.digests)
    return _placed(recording, ids, images, sent, difference)


def _placed(
    recording: Recording,
    ids: list[int],
    images: tuple[str, ...],
    sent: tuple[Fingerprint, ...],
    difference: Difference | None,
) -> Prompt:
    """Returns the prompt after the longest path that is a prefix of its ids, or on a new branch if there is none."""
    parent = recording.find_ids(ids, images)
    return Prompt(
        parent=parent,
        ids=ids,
        images=images,
        num_held_ids=0 if parent is None else len(parent.held_ids()),
        num_held_images=0 if parent is None else len(parent.held_images()),
        context=sent,
        from_start=True,
        difference=difference,
    )


async def _continued(
    match: Match, sent: tuple[Fingerprint, ...], conversation: Conversation, chat: ChatTokens
) -> Prompt | None:
    """Returns the prompt that continues a turn; None if the template cannot render the new messages alone."""
    turn = match.turn
    assert turn is not None
    if turn.is_unusable:
        raise InvalidPayloadError(
            f"turn {turn.number} holds a vision token that the model sampled: no prompt can continue it. Close the "
            "session, or repeat the request of the turn before it",
            {"param": "messages"},
        )
    new = conversation.messages[match.consumed :]
    try:
        bridge = await _rendered(lambda: chat.bridge_over(new, turn_is_closed=turn.is_closed), new)
    except ConfigError:
        return None
    held, held_images = turn.held_ids(), turn.held_images()
    return Prompt(
        parent=turn,
        ids=held + bridge,
        images=(*held_images, *image_hashes_of(new)),
        num_held_ids=len(held),
        num_held_images=len(held_images),
        context=sent[match.consumed :],
        from_start=False,
        tolerated=match.tolerated,
        difference=match.difference,
    )


async def _rendered(render: Callable[[], list[int]], messages: Sequence[Message]) -> list[int]:
    if sum(len(message["content"]) for message in messages if isinstance(message["content"], str)) < MAX_INLINE_LENGTH:
        return render()
    return await asyncio.to_thread(render)
