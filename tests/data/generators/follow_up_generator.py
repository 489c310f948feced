"""A conversation whose every assistant turn is sampled: the questions of an instance, one after the other.

With ``"mode": "history"`` in the instance each prompt is rendered anew from the messages; else it only grows. The first
prompt is spelled letter by letter, as no tokenizer would write it, where the instance says ``"spelled": true``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateRequest
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Message, Outcome, StopReason, Trajectory

TASK_TYPE = "follow_up"


class FollowUpGenerator:
    """Asks ``instance["questions"]``, keeps every sampled id, and answers a turn with the next question."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._chat: ChatTokens | None = None
        self._tokenizer: Any = None

    async def start(self, context: GeneratorContext) -> None:
        """Remembers the engine and the chat template."""
        self._engine, self._chat, self._tokenizer = context.engine, ChatTokens(context.tokenizer), context.tokenizer

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Samples one turn for each question; the reward is one for saying anything."""
        assert self._engine is not None
        assert self._chat is not None
        messages: list[Message] = []
        generations: list[Generation] = []
        for question in episode.instance.data["questions"]:
            asked: Message = dict(question)
            if episode.instance.data.get("mode") == "history":
                prompt = self._chat.prompt([*messages, asked])
            else:
                prompt = self._prompt(self._chat, asked, generations)
            if episode.instance.data.get("spelled") and not generations:
                prompt = self._spelled(prompt)
            reply = await self._engine.generate(
                GenerateRequest(input_ids=prompt, sampling_params=episode.sampling_params, session_id=episode.uid)
            )
            generations.append(reply.as_generation(prompt))
            messages += [asked, {"role": "assistant", "content": self._chat.text(reply.output_ids)}]
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=tuple(messages),
            reward=1.0,
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.STOP,
            generations=tuple(generations),
            extra_info={"sampled_tokens": sum(len(generation.output_ids) for generation in generations)},
        )

    async def close(self) -> None:
        """Does nothing; the engine belongs to the runner."""

    def _spelled(self, ids: Sequence[int]) -> list[int]:
        """The same text in single letters; special tokens stay what they are."""
        special = set(self._tokenizer.all_special_ids)
        pieces = [[token] if token in special else self._letters(token) for token in ids]
        return [token for piece in pieces for token in piece]

    def _letters(self, token: int) -> list[int]:
        text = self._tokenizer.decode([token])
        return [one for letter in text for one in self._tokenizer.encode(letter, add_special_tokens=False)]

    @staticmethod
    def _prompt(chat: ChatTokens, asked: Message, generations: Sequence[Generation]) -> list[int]:
        if not generations:
            return chat.prompt([asked])
        last = generations[-1]
        bridge = chat.bridge(asked, turn_is_closed=chat.is_closed(last.output_ids))
        return [*last.prompt_ids, *last.output_ids, *bridge]


def create_generator() -> Generator:
    """The generator of this file."""
    return FollowUpGenerator()
