"""A task that a tiny policy learns in minutes: in three turns the user gives a digit, and the next digit is right.

    user: 3    assistant: 4    user: 7    assistant: 8    user: 1    assistant: 3      reward 2/3

The digits of later turns are tokens of the environment between those of the policy, so that a wrong mask shows. The
file is an example of a task: a generator, its instances, and a scripted policy for the warm-up (docs/learning.md).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateRequest
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Outcome, StopReason, Trajectory

TASK_TYPE = "next_digit"
REWARD_RANGE = (0.0, 1.0)
MAX_NEW_TOKENS = 4
"""Longest reply: a digit, the end of the turn, and room to be wrong."""
TURNS = 3
LARGEST_DIGIT = 7
RIGHT_AT_FIRST = 0.5
"""How often the scripted player is right."""
ENDINGS = {
    "stop": (Outcome.COMPLETED, StopReason.STOP),
    "length": (Outcome.TRUNCATED, StopReason.MAX_TOKENS),
    "abort": (Outcome.ABORTED, StopReason.ABORTED),
}


class NextDigitGenerator:
    """Plays the turns of an episode; a reply that does not end within its limit ends the episode."""

    async def start(self, context: GeneratorContext) -> None:
        """Keeps the engine and the tokenizer's chat template."""
        self._engine: Engine = context.engine
        self._chat = ChatTokens(context.tokenizer)

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode; ``turn_rewards`` in its ``extra_info`` has 1 for each right turn."""
        digits: list[int] = episode.instance.data["digits"]
        messages: list[dict[str, Any]] = [_question(digits[0])]
        prompt_ids = self._chat.prompt(messages)
        generations: list[Generation] = []
        right: list[float] = []
        for turn, digit in enumerate(digits):
            if turn > 0:
                messages.append(_question(digit))
                context = [*generations[-1].prompt_ids, *generations[-1].output_ids]
                prompt_ids = [*context, *self._chat.bridge(messages[-1], turn_is_closed=True)]
            generation = await self._sample(prompt_ids, episode)
            text = self._chat.text(generation.output_ids)
            generations.append(generation)
            messages.append({"role": "assistant", "content": text})
            right.append(float(text.strip() == str(digit + 1)))
            if not self._chat.is_closed(generation.output_ids):
                break
        outcome, stop_reason = ENDINGS[generations[-1].finish_reason]
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=messages,
            reward=sum(right) / len(digits),
            outcome=outcome,
            stop_reason=stop_reason,
            generations=generations,
            extra_info={"turn_rewards": [*right, *[0.0] * (len(digits) - len(right))]},
        )

    async def close(self) -> None:
        """Does nothing: the generator holds no resources."""

    async def _sample(self, prompt_ids: list[int], episode: EpisodeRequest) -> Generation:
        reply = await self._engine.generate(
            GenerateRequest(input_ids=prompt_ids, sampling_params=episode.sampling_params, session_id=episode.uid)
        )
        return reply.as_generation(prompt_ids)


def create_generator() -> NextDigitGenerator:
    """Returns a generator that is not started yet."""
    return NextDigitGenerator()


def instances(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Returns that many input lines: the digits of each turn."""
    return [{"digits": [rng.randint(1, LARGEST_DIGIT) for _ in range(TURNS)]} for _ in range(count)]


def scripted_reply(prompt: str, instance: Mapping[str, Any], rng: random.Random) -> str:
    """Returns the reply of a policy that is right in half of the turns; ``prompt`` is the conversation so far."""
    digit = int(prompt.rsplit("user\n", 1)[1][0])
    wrong = [other for other in range(1, LARGEST_DIGIT + 2) if other != digit + 1]
    return str(digit + 1 if rng.random() < RIGHT_AT_FIRST else rng.choice(wrong))


def _question(digit: int) -> dict[str, Any]:
    return {"role": "user", "content": str(digit)}
