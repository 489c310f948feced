"""The growing side of an episode: held token ids, messages, screenshots and generations, and the room that is left.

Append-only, token by token: what the engine sampled goes in as ids and stays as ids. Images count with the tokens that
the engine makes of them: by an upper bound from the screenshot's area first, by the engine's own count afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime_plugins.rollout_buffer.engine import GenerateReply
from slime_plugins.rollout_buffer.generator.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.types import Generation, Image, Message, WeightVersionSpan

__all__ = ["Conversation"]


class Conversation:
    """One episode's tokens, from the first prompt on. ``images`` has one entry per placeholder, in order.

    Invariant: ``held_ids`` begins with every earlier value of itself, and after a reply ends with what was sampled.
    """

    def __init__(self, chat: ChatTokens, *, max_context_len: int, image_tokens: int) -> None:
        self._chat = chat
        self._max_context_len = max_context_len
        self._image_tokens = image_tokens
        self.held_ids: list[int] = []
        self.messages: list[Message] = []
        self.images: list[Image] = []
        self.generations: list[Generation] = []

    @property
    def room(self) -> int:
        """How many tokens may still be appended; negative when the prompt alone is too long."""
        return self._max_context_len - self._expanded_length(len(self.held_ids), len(self.images))

    def open(self, messages: Sequence[Message], screenshot: Image) -> None:
        """Begins with the first prompt, which shows ``screenshot``."""
        self.held_ids = self._chat.prompt(messages)
        self.messages = list(messages)
        self.images = [screenshot]

    def add_observation(self, message: Message, screenshot: Image) -> bool:
        """Appends the next observation; returns False and appends nothing if that would leave no room to reply."""
        closed = self._chat.is_closed(self.generations[-1].output_ids)
        bridge = self._chat.bridge(message, turn_is_closed=closed)
        length = self._expanded_length(len(self.held_ids) + len(bridge), len(self.images) + 1)
        if length >= self._max_context_len:
            return False
        self.held_ids += bridge
        self.messages.append(message)
        self.images.append(screenshot)
        return True

    def add_reply(self, reply: GenerateReply) -> str:
        """Appends what was sampled and returns its text, up to the first image token if one was sampled."""
        self._measure_images(reply)
        generation = _generation(self.held_ids, reply, self._allowed_length(reply.output_ids))
        text = self._chat.text(generation.output_ids)
        if generation.output_ids:
            self.generations.append(generation)
            self.held_ids += generation.output_ids
            self.messages.append({"role": "assistant", "content": text})
        return text

    def has_forbidden_token(self, reply: GenerateReply) -> bool:
        """Returns whether the reply holds a token that only the chat template may write."""
        return self._allowed_length(reply.output_ids) < len(reply.output_ids)

    def distinct_images(self) -> list[Image]:
        """Returns each screenshot once, in order of first appearance."""
        return list({image.sha256: image for image in self.images}.values())

    def _allowed_length(self, output_ids: Sequence[int]) -> int:
        forbidden = self._chat.vision_ids
        return next((index for index, token in enumerate(output_ids) if token in forbidden), len(output_ids))

    def _expanded_length(self, ids: int, images: int) -> int:
        return ids + images * (self._image_tokens - 1)

    def _measure_images(self, reply: GenerateReply) -> None:
        """Takes over the engine's own count of image tokens: the mean per screenshot, rounded up."""
        if reply.prompt_tokens is None or not self.images:
            return
        spent_on_images = reply.prompt_tokens - len(self.held_ids) + len(self.images)
        if spent_on_images >= len(self.images):
            self._image_tokens = -(-spent_on_images // len(self.images))


def _generation(prompt_ids: Sequence[int], reply: GenerateReply, length: int) -> Generation:
    """Returns the record of a turn, cut to its first ``length`` sampled tokens."""
    spans = (
        WeightVersionSpan(weight_version=span.weight_version, start=span.start, end=min(span.end, length))
        for span in reply.weight_version_spans
        if span.start < length
    )
    return Generation(
        prompt_ids=tuple(prompt_ids),
        output_ids=reply.output_ids[:length],
        output_log_probs=reply.output_log_probs[:length],
        finish_reason=reply.finish_reason if length == len(reply.output_ids) else "length",
        weight_version=reply.weight_version,
        weight_version_spans=tuple(spans),
    )
