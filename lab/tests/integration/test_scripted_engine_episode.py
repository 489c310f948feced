"""Whole Android World episodes over HTTP: simulated phones, the SGLang client, and the scripted engine's policy."""

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

from rollout_buffer_lab.scripted_engine.scripted_backend import ScriptedBackend
from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.scripted_engine.token_records import experts_of_passes, kept_ids
from rollout_buffer_lab.sglang_routes.records import GenerateCall, Sampled
from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords
from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.token_alignment import read_records, routed_experts_of_row
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Trajectory
from tests.demo_tokens import tokenizer, trained_text
from tests.engine_contracts import until
from tests.episode_requests import phone_episode, use_local_phones

QUICK = EngineSettings(retry_timeout_s=30.0, deadline_s=50.0, backoff_first_s=0.02, backoff_longest_s=0.1)
TASKS = ("SystemWifiTurnOn", "SimpleSmsSend", "MarkorCreateNote", "SimpleCalendarNextEvent")


def episode(task: str, slot: int) -> EpisodeRequest:
    return phone_episode(task, 1, f"{task}/{slot}", slot=slot)


@asynccontextmanager
async def generator_with(url: str, **options: Any) -> AsyncIterator[Generator]:
    engine, generator = SglangEngine(url, QUICK), create_generator()
    try:
        context = GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=4, options=options)
        await generator.start(context)
        yield generator
    finally:
        await generator.close()
        await engine.close()


@pytest.fixture(autouse=True)
def _local_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_phones(tmp_path, monkeypatch)


async def play_all(settings: ScriptedEngineSettings, slots: int = 1) -> Sequence[Trajectory]:
    async with running(settings) as url, generator_with(url) as generator:
        return await asyncio.gather(*(generator.play(episode(task, slot)) for task in TASKS for slot in range(slots)))


def trained(trajectory: Trajectory) -> str:
    rows = pack_training_rows(trajectory.generations)
    return "".join(trained_text(row.token_ids, row.loss_mask) for row in rows)


def said(trajectory: Trajectory) -> str:
    return "".join(
        f"{message['content']}<|im_end|>" for message in trajectory.messages if message["role"] == "assistant"
    )


async def test_full_skill_solves_tasks_through_token_ids_and_screenshots() -> None:
    played = await play_all(ScriptedEngineSettings(port=0, skill=1.0))
    assert [trajectory.extra_info["success"] for trajectory in played] == [1.0] * len(TASKS)
    for trajectory in played:
        assert trained(trajectory) == said(trajectory)
        assert {generation.weight_version for generation in trajectory.generations} == {"default"}


async def test_siblings_of_a_group_earn_mixed_rewards() -> None:
    played = await play_all(ScriptedEngineSettings(port=0, skill=0.6), slots=4)
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
    settings = ScriptedEngineSettings(port=0, skill=1.0, token_latency_s=0.002)
    async with running(settings) as url, generator_with(url) as generator, aiohttp.ClientSession() as session:
        updates = asyncio.create_task(update_weights(session, url, mode))
        played = await asyncio.gather(*(generator.play(episode(task, 0)) for task in TASKS[:2]))
        updates.cancel()
    was_cut = any(part.finish_reason["type"] == "abort" for part in sampled)
    assert was_cut == (mode == "abort")
    for trajectory in played:
        assert trajectory.extra_info["success"] == 1.0
        assert trained(trajectory) == said(trajectory)
        for generation in trajectory.generations:
            spans = generation.weight_version_spans
            assert [span.weight_version for span in spans for _ in range(span.end - span.start)] == versions_as_sampled(
                generation, sampled
            )
            assert len(generation.output_log_probs or ()) == len(generation.output_ids)
    crossed = [len(generation.weight_version_spans) for trajectory in played for generation in trajectory.generations]
    assert max(crossed) >= 2


async def test_an_engine_that_does_not_come_back_from_an_update_is_a_failure_and_no_reward() -> None:
    settings = ScriptedEngineSettings(port=0, skill=1.0, token_latency_s=0.01)
    impatient = replace(QUICK, retry_timeout_s=0.2, deadline_s=3.0)
    async with running(settings) as url, aiohttp.ClientSession() as session:
        engine, generator = SglangEngine(url, impatient), create_generator()
        await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=4))
        playing = asyncio.create_task(generator.play(episode(TASKS[0], 0)))
        await until(url, lambda load: load > 0)
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


# ---- experts and kept ids -------------------------------------------------------------------------------------------


def records_of(generation: Generation, kind: str) -> TokenRecords:
    return TokenRecords.decode(generation.records[kind].data or b"")


def expanded_ids(generation: Generation, sampled: list[Sampled]) -> list[int]:
    """The prompt of a turn as the engine read it, by the engine's own account."""
    output = list(generation.output_ids)
    return next(
        part.prompt_ids
        for part in sampled
        if len(part.prompt_ids) == generation.prompt_tokens and output[: len(part.output_ids)] == part.output_ids
    )


@pytest.mark.parametrize("rollout_mode", ["incremental", "history"])
async def test_every_token_of_an_episode_has_the_experts_and_kept_ids_that_the_engine_told(
    rollout_mode: str, sampled: list[Sampled]
) -> None:
    """With screenshots, over turns that go on and contexts that are edited; the made-up experts tell their token."""
    settings = ScriptedEngineSettings(port=0, skill=1.0, token_records=True)
    asked = {"return_routed_experts": True, "custom_params": {"return_top_p_token_ids": True}}
    options = {"android_world": {"rollout_mode": rollout_mode}}
    async with running(settings) as url, generator_with(url, **options) as generator:
        request = episode(TASKS[1], 0)
        params = replace(request.sampling_params, top_p=0.9, extra=asked)
        played = await generator.play(replace(request, sampling_params=params))
    assert len(played.generations) > 2
    decoded = wire.decode_generations(wire.encode_generations(played.generations))
    kept = {one.sha256: one.data for each in played.generations for one in each.records.values() if one.data}
    records = read_records(decoded, (ROUTED_EXPERTS, TOP_P_TOKENS), FetchedImages(data=kept))
    starts = [records_of(one, ROUTED_EXPERTS).start for one in played.generations]
    assert (starts[1:] == [1] * len(starts[1:])) == (rollout_mode == "history")
    for row in pack_training_rows(decoded):
        last = decoded[row.generation_indices[-1]]
        ids = [*expanded_ids(last, sampled), *last.output_ids]
        assert len(ids) > len(row.token_ids)
        expanded = replace(row, token_ids=ids)
        experts = routed_experts_of_row(row, expanded, decoded, records, None)
        assert [one.tolist() for one in experts.split()] == experts_of_passes(ids, "default")
    for generation in played.generations:
        spans = [one.tolist() for one in records_of(generation, TOP_P_TOKENS).split()]
        assert spans == kept_ids(generation.output_ids)


async def test_a_turn_that_the_engine_aborted_keeps_the_experts_of_each_part(sampled: list[Sampled]) -> None:
    settings = ScriptedEngineSettings(port=0, skill=1.0, token_latency_s=0.002, token_records=True)
    async with running(settings) as url, generator_with(url) as generator, aiohttp.ClientSession() as session:
        updates = asyncio.create_task(update_weights(session, url, "abort"))
        request = episode(TASKS[1], 0)
        params = replace(request.sampling_params, extra={"return_routed_experts": True})
        played = await generator.play(replace(request, sampling_params=params))
        updates.cancel()
    assert any(part.finish_reason["type"] == "abort" and part.output_ids for part in sampled)
    resumed = [one for one in played.generations if len(one.weight_version_spans) > 1]
    assert resumed
    for generation in resumed:
        prompt = expanded_ids(generation, sampled)
        ids, experts = [*prompt, *generation.output_ids], records_of(generation, ROUTED_EXPERTS)
        by_version = {
            span.weight_version: experts_of_passes(ids, span.weight_version) for span in generation.weight_version_spans
        }
        told = dict(enumerate((one.tolist() for one in experts.split()), experts.start))
        for span in generation.weight_version_spans:
            for place in range(len(prompt) + span.start, len(prompt) + span.end):
                assert told[place] == by_version[span.weight_version][place - 1]
