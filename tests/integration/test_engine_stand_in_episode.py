"""Whole Android World episodes over HTTP: simulated phones, the SGLang client, and the stand-in engine's policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine import EngineSettings, SglangEngine
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.stand_in_engine.server import running
from slime_plugins.rollout_buffer.stand_in_engine.settings import StandInSettings
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, SamplingParams, Trajectory

TOKENIZER: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
QUICK = EngineSettings(patience_s=30.0, deadline_s=50.0, backoff_first_s=0.02, backoff_longest_s=0.1)
TASKS = ("SystemWifiTurnOn", "SimpleSmsSend", "MarkorCreateNote", "SimpleCalendarNextEvent")


def episode(task: str, slot: int) -> EpisodeRequest:
    data = {"metadata": {"task_name": task, "params_idx": 1}}
    return EpisodeRequest(
        uid=f"{task}/{slot}",
        job_id="job",
        instance=Instance(instance_id=task, data={"instance_id": task, **data}),
        epoch=0,
        slot=slot,
        attempt=0,
        sampling_params=SamplingParams(max_new_tokens=1024),
    )


@asynccontextmanager
async def generator_with(url: str) -> AsyncIterator[Generator]:
    engine, generator = SglangEngine(url, QUICK), create_generator()
    try:
        await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=TOKENIZER, concurrency=4))
        yield generator
    finally:
        await generator.close()
        await engine.close()


@pytest.fixture(autouse=True)
def _local_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "android_world.yaml"
    config.write_text("device_pool: local\nnum_workers: 4\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))


async def play_all(settings: StandInSettings, slots: int = 1) -> Sequence[Trajectory]:
    async with running(settings) as url, generator_with(url) as generator:
        return await asyncio.gather(*(generator.play(episode(task, slot)) for task in TASKS for slot in range(slots)))


def trained_text(trajectory: Trajectory) -> str:
    rows = pack_training_rows(trajectory.generations)
    pairs = (zip(row.token_ids, row.loss_mask, strict=True) for row in rows)
    return "".join(TOKENIZER.decode([token for token, mask in pair if mask]) for pair in pairs)


def said(trajectory: Trajectory) -> str:
    return "".join(
        f"{message['content']}<|im_end|>" for message in trajectory.messages if message["role"] == "assistant"
    )


async def test_full_skill_solves_tasks_through_token_ids_and_screenshots() -> None:
    played = await play_all(StandInSettings(port=0, skill=1.0))
    assert [trajectory.extra_info["success"] for trajectory in played] == [1.0] * len(TASKS)
    for trajectory in played:
        assert trained_text(trajectory) == said(trajectory)
        assert {generation.weight_version for generation in trajectory.generations} == {"default"}


async def test_siblings_of_a_group_earn_mixed_rewards() -> None:
    played = await play_all(StandInSettings(port=0, skill=0.6), slots=4)
    groups = [played[start : start + 4] for start in range(0, len(played), 4)]
    mixed = [group for group in groups if len({bool(trajectory.extra_info["success"]) for trajectory in group}) == 2]
    assert len(mixed) >= 2


async def test_episodes_go_on_through_updates_of_the_weights() -> None:
    """Every half second all running turns are aborted, as a trainer does; what was sampled is kept and trained."""
    settings = StandInSettings(port=0, skill=1.0, token_latency_s=0.002)
    async with running(settings) as url, generator_with(url) as generator, aiohttp.ClientSession() as session:
        updates = asyncio.create_task(update_weights(session, url))
        played = await asyncio.gather(*(generator.play(episode(task, 0)) for task in TASKS[:2]))
        updates.cancel()
    for trajectory in played:
        assert trajectory.extra_info["success"] == 1.0
        assert trained_text(trajectory) == said(trajectory)
    spans = [len(generation.weight_version_spans) for trajectory in played for generation in trajectory.generations]
    assert max(spans) >= 2


async def update_weights(session: aiohttp.ClientSession, url: str) -> None:
    for version in range(1, 1000):
        await asyncio.sleep(0.5)
        for route, body in (
            ("pause_generation", {}),
            ("update_weight_version", {"new_version": str(version)}),
            ("continue_generation", {}),
        ):
            async with session.post(f"{url}/{route}", data=json.dumps(body)) as response:
                assert response.status == 200
