"""Whole Android World episodes over HTTP: simulated phones, the SGLang client, and the stand-in engine's policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.sglang_server.records import GenerateCall, Sampled
from slime_plugins.rollout_buffer.simulation.engine.scripted_backend import ScriptedBackend
from slime_plugins.rollout_buffer.simulation.engine.server import running
from slime_plugins.rollout_buffer.simulation.engine.settings import StandInSettings
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Instance,
    SamplingParams,
    Trajectory,
)

TOKENIZER: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
QUICK = EngineSettings(retry_timeout_s=30.0, deadline_s=50.0, backoff_first_s=0.02, backoff_longest_s=0.1)
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


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Sampled]:
    """Everything that the engine sampled, in parts, as the engine itself knows it."""
    parts: list[Sampled] = []
    generate = ScriptedBackend.generate

    async def record(self: ScriptedBackend, call: GenerateCall) -> Sampled:
        part = await generate(self, call)
        parts.append(part)
        return part

    monkeypatch.setattr(ScriptedBackend, "generate", record)
    return parts


def versions_as_sampled(generation: Generation, parts: list[Sampled]) -> list[str]:
    """The version of each token of a turn by the engine's own account, whose parts are used up by it."""
    versions: list[str] = []
    wanted = list(generation.output_ids)
    while len(versions) < len(wanted):
        at = len(versions)
        part = next(
            part
            for part in parts
            if part.output_ids
            and part.output_ids == wanted[at : at + len(part.output_ids)]
            and part.prompt_ids[len(part.prompt_ids) - at :] == wanted[:at]
            and len(part.prompt_ids) - at == generation.prompt_tokens
        )
        parts.remove(part)
        for version, start, end in part.version_spans:
            versions += [version] * (end - start)
    return versions


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_episodes_go_on_through_updates_of_the_weights_with_exact_tokens_and_versions(
    mode: str, sampled: list[Sampled]
) -> None:
    """Every quarter of a second the trainer updates; running turns are cut and go on, or wait, by the mode."""
    settings = StandInSettings(port=0, skill=1.0, token_latency_s=0.002)
    async with running(settings) as url, generator_with(url) as generator, aiohttp.ClientSession() as session:
        updates = asyncio.create_task(update_weights(session, url, mode))
        played = await asyncio.gather(*(generator.play(episode(task, 0)) for task in TASKS[:2]))
        updates.cancel()
    was_cut = any(part.finish_reason["type"] == "abort" for part in sampled)
    assert was_cut == (mode == "abort")
    for trajectory in played:
        assert trajectory.extra_info["success"] == 1.0
        assert trained_text(trajectory) == said(trajectory)
        for generation in trajectory.generations:
            spans = generation.weight_version_spans
            assert [span.weight_version for span in spans for _ in range(span.end - span.start)] == versions_as_sampled(
                generation, sampled
            )
            assert len(generation.output_log_probs or ()) == len(generation.output_ids)
    crossed = [len(generation.weight_version_spans) for trajectory in played for generation in trajectory.generations]
    assert max(crossed) >= 2


async def test_an_engine_that_does_not_come_back_from_an_update_is_a_failure_and_no_reward() -> None:
    settings = StandInSettings(port=0, skill=1.0, token_latency_s=0.05)
    impatient = replace(QUICK, retry_timeout_s=0.2, deadline_s=3.0)
    async with running(settings) as url, aiohttp.ClientSession() as session:
        engine, generator = SglangEngine(url, impatient), create_generator()
        await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=TOKENIZER, concurrency=4))
        playing = asyncio.create_task(generator.play(episode(TASKS[0], 0)))
        await asyncio.sleep(1.0)
        async with session.post(f"{url}/pause_generation", data=json.dumps({"mode": "abort"})) as response:
            assert response.status == 200
        try:
            with pytest.raises(EngineError):
                await playing
        finally:
            await generator.close()
            await engine.close()


async def update_weights(session: aiohttp.ClientSession, url: str, mode: str) -> None:
    for version in range(1, 1000):
        await asyncio.sleep(0.25)
        for route, body in (
            ("pause_generation", {"mode": mode}),
            ("update_weight_version", {"new_version": str(version)}),
            ("continue_generation", {}),
        ):
            async with session.post(f"{url}/{route}", data=json.dumps(body)) as response:
                assert response.status == 200
