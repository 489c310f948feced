"""The whole android_world generator on simulated phones: settings, pool, episodes, rewards, wire and training rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.generator.android_world_generator import REWARD_RANGE, create_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Instance,
    Outcome,
    SamplingParams,
    StopReason,
    Trajectory,
)
from tests.android_world_expert import expert_replies, say, turn_of

tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)

DEMO_TASKS = Path(__file__).resolve().parents[2] / "slime_plugins/rollout_buffer/assets/demo_android_world.jsonl"
SKILLED = "slot-0"


def demo_instances() -> list[Instance]:
    lines = map(json.loads, DEMO_TASKS.read_text(encoding="utf-8").splitlines())
    return [Instance(instance_id=line["instance_id"], data=line) for line in lines]


def request_for(instance: Instance, slot: int = 0) -> EpisodeRequest:
    return EpisodeRequest(
        uid=f"{instance.instance_id}/slot-{slot}",
        job_id="job",
        instance=instance,
        epoch=0,
        slot=slot,
        attempt=0,
        sampling_params=SamplingParams(max_new_tokens=1024),
    )


def policy(request: GenerateRequest) -> str:
    """Solves the task in slot 0, gives up at once in slot 1, talks without end in the others."""
    instance_id, slot = request.session_id.split("/")
    task_name, params_idx = instance_id.rsplit("-", 1)
    if slot == SKILLED:
        return expert_replies(task_name, int(params_idx))[turn_of(request)]
    return say(action="terminate", status="failure") if slot == "slot-1" else "What a lovely phone."


def configure(config: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    config.write_text("device_pool: local\nnum_workers: 3\n" + text, encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))


@asynccontextmanager
async def generator_on(
    config: Path, monkeypatch: pytest.MonkeyPatch, text: str = "", **options: Any
) -> AsyncIterator[tuple[Generator, FakeEngine]]:
    configure(config, monkeypatch, text)
    engine = FakeEngine(policy, tokenizer=tokenizer)
    generator = create_generator()
    context = GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=8, options=options)
    try:
        await generator.start(context)
        yield generator, engine
    finally:
        await generator.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "android_world.yaml"


@pytest.mark.large
async def test_every_demo_task_is_solved_by_who_knows_how_and_by_nobody_else(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = demo_instances()
    async with generator_on(config, monkeypatch) as (generator, _):
        episodes = [generator.play(request_for(instance, slot)) for instance in instances for slot in range(3)]
        played = await asyncio.gather(*episodes)
    for skilled, hasty, talker in zip(played[0::3], played[1::3], played[2::3], strict=True):
        assert skilled.extra_info["success"], skilled.instance_id
        assert 0.3 < skilled.reward <= REWARD_RANGE[1]
        assert REWARD_RANGE[0] <= hasty.reward < 0
        assert (talker.stop_reason, talker.reward) == (StopReason.MAX_TURNS, 0.0)
        assert talker.extra_info["malformed_turns"] == talker.extra_info["turns"] == talker.extra_info["max_turns"]


async def test_rows_train_exactly_what_was_said_and_images_stand_where_the_template_puts_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = demo_instances()[0]
    async with generator_on(config, monkeypatch) as (generator, _):
        trajectory = await generator.play(request_for(instance))
    (row,) = pack_training_rows(trajectory.generations)
    trained = tokenizer.decode([token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask])
    task_name, params_idx = instance.instance_id.rsplit("-", 1)
    assert trained == "".join(f"{reply}<|im_end|>" for reply in expert_replies(task_name, int(params_idx)))
    rebuilt, _ = MultiTurnLossMaskGenerator(tokenizer, "qwen3").get_loss_mask(list(trajectory.messages))
    assert row.token_ids == rebuilt[: len(row.token_ids)]


async def test_a_trajectory_survives_the_wire(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with generator_on(config, monkeypatch) as (generator, _):
        trajectory = await generator.play(request_for(demo_instances()[0]))
    back = wire.decode_generations(wire.encode_generations(trajectory.generations))
    assert [list(generation.output_ids) for generation in back] == [
        list(generation.output_ids) for generation in trajectory.generations
    ]
    json.dumps(dict(trajectory.extra_info))
    assert all(image.media_type == "image/png" and wire.image_media_type(image.data) for image in trajectory.images)


async def test_a_job_may_limit_turns_and_context_but_not_choose_programs(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = demo_instances()[0]
    async with generator_on(config, monkeypatch, android_world={"max_turns": 2}) as (generator, _):
        trajectory = await generator.play(request_for(instance, slot=2))
    assert trajectory.extra_info["turns"] == 2
    with pytest.raises(ConfigError, match="belongs to the host"):
        async with generator_on(config, monkeypatch, android_world={"adb_path": "/bin/sh"}):
            pass


async def test_an_unknown_task_fails_its_attempt_and_hurts_nobody_else(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Instance(instance_id="MakeCoffee-0", data={"metadata": {"task_name": "MakeCoffee", "params_idx": 0}})
    async with generator_on(config, monkeypatch) as (generator, _):
        with pytest.raises(EnvironmentSetupError, match="MakeCoffee"):
            await generator.play(request_for(unknown, slot=1))
        assert (await generator.play(request_for(demo_instances()[0], slot=1))).outcome is Outcome.COMPLETED


async def test_cancelled_episodes_give_their_phones_back(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = demo_instances()[0]
    async with generator_on(config, monkeypatch, "simulated_latency_s: 0.2\nacquire_timeout_s: 5\n") as (generator, _):
        tasks = [asyncio.create_task(generator.play(request_for(instance))) for _ in range(6)]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        assert all(isinstance(result, asyncio.CancelledError) for result in await _results(tasks))
        assert (await generator.play(request_for(instance, slot=1))).outcome is Outcome.COMPLETED


async def _results(tasks: list[asyncio.Task[Trajectory]]) -> list[Trajectory | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_generator_whose_devices_do_not_come_up_says_why(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="needs the package"):
        async with generator_on(config, monkeypatch, "device: android_world\n"):
            pass
