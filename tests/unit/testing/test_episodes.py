"""What is shipped for the tests of one's own generators: an episode as the runner asks for it, and its checks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import EpisodeError, GeneratorError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext, SingleTurnGenerator
from slime_plugins.rollout_buffer.testing.episodes import episode_request, play_episode
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, Outcome, Trajectory


class Counting(SingleTurnGenerator):
    """Rewards the length of a reply; counts how often it was opened and closed."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes
        self.open = 0

    async def start(self, context: GeneratorContext) -> None:
        await super().start(context)
        self.open += 1

    async def reward(self, instance: Instance, text: str) -> float:
        return float(len(text))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        return dataclasses.replace(await super().play(episode), **self.changes)

    async def close(self) -> None:
        self.open -= 1


def tokenizer_of_the_demo() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)


LINE = {"instance_id": "7", "prompt": [{"role": "user", "content": "How long?"}]}


async def test_an_episode_is_played_and_the_generator_closed() -> None:
    tokenizer, generator = tokenizer_of_the_demo(), Counting()
    trajectory = await play_episode(
        generator, episode_request(LINE), FakeEngine(["four"], tokenizer=tokenizer), tokenizer=tokenizer
    )
    assert (trajectory.instance_id, trajectory.reward, generator.open) == ("7", 4.0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": "another"},
        {"instance_id": "8"},
        {"outcome": Outcome.ABORTED},
        {"reward": math.nan},
        {"messages": ({"role": "assistant", "content": 7},)},
        {"turn_rewards": (0.5, 0.5)},
    ],
)
async def test_what_the_runner_refuses_fails_the_test(changes: dict[str, Any]) -> None:
    tokenizer, generator = tokenizer_of_the_demo(), Counting(**changes)
    with pytest.raises((EpisodeError, GeneratorError)):
        await play_episode(
            generator, episode_request(LINE), FakeEngine(["four"], tokenizer=tokenizer), tokenizer=tokenizer
        )
    assert generator.open == 0
