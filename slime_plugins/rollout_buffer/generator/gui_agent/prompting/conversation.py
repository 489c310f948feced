"""The record of a running episode: messages, screenshots, generations, the present prompt, and the room left.

Sampled ids are stored as they were sampled. The context renders prompts. Images count with the engine's number of
tokens (``image_token_counter.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import Context, LastTurn, Prompt
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.image_token_counter import ImageTokenCounter
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import ParsedReply
from slime_plugins.rollout_buffer.types import Generation, Image, Message


class Conversation:
    """One episode from the first prompt on. ``prompt`` is the input of the next turn.

    ``messages`` hold each observation and each reply once. The k-th generation is the k-th message of the assistant.
    """

    def __init__(
        self, chat: ChatTokens, context: Context, *, max_context_len: int, image_tokens: ImageTokenCounter
    ) -> None:
        self._chat = chat
        self._context = context
        self._max_context_len = max_context_len
        self._image_tokens = image_tokens
        self._images: dict[str, Image] = {}
        self.prompt = Prompt(ids=(), images=())
        self.messages: list[Message] = []
        self.generations: list[Generation] = []

    @property
    def room(self) -> int:
        """Number of tokens that may be sampled after the present prompt; negative if the prompt alone is too long."""
        return self._max_context_len - self._expanded_length(self.prompt)

    def open(self, observation: Observation) -> None:
        """Renders the first prompt."""
        messages, self.prompt = self._context.begin(observation)
        self.messages = list(messages)
        self._keep_image(observation.screenshot)

    def add_observation(self, observation: Observation, *, turn: int, max_turns: int, reply: ParsedReply) -> bool:
        """Renders the prompt after turn ``turn``; returns False and records nothing if it leaves no room for a reply.

        ``reply`` is that turn's parsed reply.
        """
        output_ids = self.generations[-1].output_ids
        last = LastTurn(number=turn, max_turns=max_turns, output_ids=output_ids, reply=reply)
        message, prompt = self._context.go_on(last, observation)
        if self._expanded_length(prompt) >= self._max_context_len:
            return False
        self.prompt = prompt
        self.messages.append(message)
        self._keep_image(observation.screenshot)
        return True

    def add_reply(self, reply: GenerateReply) -> str:
        """Records a reply that is not empty, and returns its text, up to the first image token if one was sampled."""
        self._image_tokens.compare(self.prompt.images, _tokens_of_images(self.prompt, reply))
        generation = reply.as_generation(
            self.prompt.ids,
            images=tuple(image.sha256 for image in self.prompt.images),
            length=self._chat.length_before_vision(reply.output_ids),
        )
        text = self._chat.text(generation.output_ids)
        if generation.output_ids:
            self.generations.append(generation)
            self.messages.append({"role": "assistant", "content": text})
        return text

    def has_forbidden_token(self, reply: GenerateReply) -> bool:
        """Returns True if the reply holds a token that only the chat template may write."""
        return self._chat.length_before_vision(reply.output_ids) < len(reply.output_ids)

    def distinct_images(self) -> list[Image]:
        """Returns each screenshot once, in order of first appearance."""
        return list(self._images.values())

    def facts(self) -> Mapping[str, Any]:
        """As ``Context.facts``."""
        return self._context.facts()

    def _keep_image(self, screenshot: Image) -> None:
        self._images.setdefault(screenshot.sha256, screenshot)

    def _expanded_length(self, prompt: Prompt) -> int:
        """Returns the length of a prompt in which the tokens of each image replace its placeholder."""
        return len(prompt.ids) - len(prompt.images) + self._image_tokens.tokens(prompt.images)


def _tokens_of_images(prompt: Prompt, reply: GenerateReply) -> int | None:
    """Returns the engine's token count of the prompt's images, reported or derived from its prompt length."""
    if reply.prompt_receipt is not None and reply.prompt_receipt.image_tokens is not None:
        return sum(reply.prompt_receipt.image_tokens)
    return None if reply.prompt_tokens is None else reply.prompt_tokens - len(prompt.ids) + len(prompt.images)
