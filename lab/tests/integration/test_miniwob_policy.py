"""The scripted policy on real pages, through the generator: it reads prompts and answers in ``mobile_use`` calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import rollout_buffer_lab.cli.demo_run as demo
from rollout_buffer_lab.scripted_engine.conversation import read_conversation
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.miniwob_generator import MiniWobGenerator
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import Outcome, StopReason, Trajectory
from tests.demo_tokens import tokenizer
from tests.miniwob_browsers import needs_a_browser

pytestmark = [pytest.mark.large, needs_a_browser, pytest.mark.slow, pytest.mark.timeout(240)]

TASKS = [json.loads(line) for line in demo.INPUT_FILES[demo.MINIWOB].read_text(encoding="utf-8").splitlines()]
FEW = ("click-button", "enter-password", "click-tab-2-hard", "navigate-tree", "simple-algebra")


class Player:
    """A started generator and the scripted policy behind a fake engine."""

    def __init__(self, skill: float, **settings: Any) -> None:
        self._skill = skill
        self._settings = settings
        self.generator = MiniWobGenerator()
        self.engine = FakeEngine(self._reply, tokenizer=tokenizer)

    async def start(self) -> None:
        context = GeneratorContext(
            job_id="job", engine=self.engine, tokenizer=tokenizer, concurrency=4, options={"miniwob": self._settings}
        )
        await self.generator.start(context)

    async def play(self, line: dict[str, Any], slot: int = 0) -> Trajectory:
        return await self.generator.play(episode_request(line, slot=slot))

    def _reply(self, request: GenerateRequest) -> str:
        conversation = read_conversation(tokenizer.decode(request.input_ids), [image.data for image in request.images])
        return reply_to(conversation, skill=self._skill, rng=SessionRng(0, request.session_id))


@pytest.fixture(params=["incremental", "history"])
async def player(request: pytest.FixtureRequest) -> AsyncIterator[Player]:
    playing = Player(1.0, rollout_mode=request.param, observation="elements")
    await playing.start()
    yield playing
    await playing.generator.close()


async def test_a_policy_that_only_reads_solves_pages_in_both_modes(player: Player) -> None:
    lines = [line for line in TASKS if line["metadata"]["task_name"] in FEW]
    assert len(lines) == len(FEW)
    for line in lines:
        trajectory = await player.play(line)
        assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.TASK_ENDED), line
        assert trajectory.extra_info["success"] is True
        rows = pack_training_rows(trajectory.generations)
        turns = len(trajectory.generations)
        assert len(rows) == (1 if trajectory.extra_info["rollout_mode"] == "incremental" else turns)
    assert not any(request.images for request in player.engine.requests)


async def test_a_careless_policy_earns_less_and_every_episode_counts() -> None:
    player = Player(0.0, observation="both", max_turns=3)
    await player.start()
    line = {"instance_id": "click-button-3", "metadata": {"task_name": "click-button", "params_idx": 3}}
    played = [await player.play(line, slot) for slot in range(6)]
    await player.generator.close()
    assert {trajectory.outcome for trajectory in played} == {Outcome.COMPLETED}
    assert min(trajectory.reward for trajectory in played) == -1.0
    assert all(len(request.images) == sum(id == image_pad() for id in request.input_ids)
               for request in player.engine.requests)  # fmt: skip


def image_pad() -> int:
    return int(tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def test_the_demo_has_thirty_tasks_or_more() -> None:
    assert len({line["metadata"]["task_name"] for line in TASKS}) >= 30


@pytest.mark.large
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "seeds"), [("incremental", 4), ("history", 1)])
async def test_the_policy_solves_every_task_of_the_demo(mode: str, seeds: int) -> None:
    player = Player(1.0, observation="elements", rollout_mode=mode)
    await player.start()
    unsolved = []
    for line in TASKS:
        for seed in range(seeds):
            task = {"task_name": line["metadata"]["task_name"], "params_idx": seed}
            trajectory = await player.play({"instance_id": line["instance_id"], "metadata": task})
            if trajectory.reward < 1:
                unsolved.append((task, trajectory.reward))
    await player.generator.close()
    assert unsolved == []
