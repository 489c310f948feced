"""Episodes with receipts: no false alarm on an engine that keeps prompts, and nothing lost on one that changes them.

The scripted engine spells what it says letter by letter: no tokenizer would write that so.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.scripted_engine.scripted_backend import ScriptedBackend
from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_tokens
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, PromptIntegrity
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.vision import ImageFeatures
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Image,
    Outcome,
    SamplingParams,
    StopReason,
    Trajectory,
)
from slime_plugins.rollout_buffer.wire.written_items import encode_body
from tests.demo_tokens import ids_of, tokenizer
from tests.episode_requests import phone_episode, use_local_phones
from tests.pictures import picture
from tests.prompt_faults import changing, retokenised
from tests.unit.trainer.test_agent_rollout_multimodal import TableVision

TASKS = ("SystemWifiTurnOn", "SimpleSmsSend", "MarkorCreateNote", "SimpleCalendarNextEvent")
ASKED = {"return_routed_experts": True, "custom_params": {"return_top_p_token_ids": True}}
SETTINGS = ScriptedEngineSettings(port=0, skill=0.7, token_records=True)


@pytest.fixture(autouse=True)
def _local_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_phones(tmp_path, monkeypatch, screenshot_max_pixels=50_000)


@pytest.fixture(autouse=True)
def _spelled_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = functools.cache(ids_of)

    def spelled(self: ScriptedBackend, text: str) -> list[int]:
        return [token for letter in text for token in letters(letter)]

    monkeypatch.setattr(ScriptedBackend, "_encode", spelled)


class SizedVision(TableVision):
    """Counts an image's tokens as Qwen3-VL's processor does."""

    placeholder_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def prepare(self, picture: Any) -> ImageFeatures:
        width, height = picture.size
        return replace(super().prepare(picture), tokens=image_tokens(width, height, ImageFamily.QWEN3_VL))


def episode(task: str, slot: int) -> EpisodeRequest:
    return phone_episode(task, 1, f"{task}/{slot}", slot=slot, top_p=0.9, extra=ASKED)


async def played(url: str, mode: str, slots: int) -> tuple[list[Trajectory], EngineFidelity | None]:
    engine, generator = make_engine(url, tokenizer=tokenizer), create_generator()
    options = {"android_world": {"rollout_mode": mode, "history_images": 2}}
    context = GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=8, options=options)
    try:
        await engine.check_records(episode(TASKS[0], 0).sampling_params)
        await generator.start(context)
        episodes = [episode(task, slot) for task in TASKS for slot in range(slots)]
        return await asyncio.gather(*map(generator.play, episodes)), engine.fidelity
    finally:
        await generator.close()
        await engine.close()


def counted(trajectories: Sequence[Trajectory]) -> tuple[Counter[str], Counter[str]]:
    """What the receipts say of all turns, and what the trainer meets when it makes rows of them."""
    prompts: Counter[str] = Counter()
    builder = RowBuilder(
        RowSettings(
            samples_per_group=1,
            masks=MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None),
            report_drift=False,
            records=(ROUTED_EXPERTS, TOP_P_TOKENS),
        )
    )
    for number, trajectory in enumerate(trajectories):
        body = encode_body(trajectory)
        prompts.update(body["extra_info"]["prompts"])
        named = {"uid": trajectory.uid, "instance_id": "a", "group_index": number, "reward": trajectory.reward}
        item = wire.decode_item(body | named)
        images = FetchedImages(data={image.sha256: image.data for image in trajectory.images})
        of_turns = (record for generation in trajectory.generations for record in generation.records.values())
        records = FetchedImages(data={record.sha256: record.data for record in of_turns if record.data is not None})
        (group,) = builder.groups([item], SizedVision(), images, records=records)
        assert not [one.dummy_reason for one in group.trajectories if one.is_dummy]
    return prompts, builder.counts


SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


def said_by_user(turn: int) -> str:
    """Every second turn shows a picture."""
    return f"<|im_start|>user\n{SHOWN if turn % 2 else ''}What is {turn}?<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def numbered(number: int) -> Image:
    return picture(28 + 8 * number, 64, (number, 0, 0))


async def talked(engine: HttpEngine, number: int, mode: str) -> Trajectory:
    """An episode of four turns, whose prompts only grow, or are rendered again."""
    held, text = ids_of("<|im_start|>system\nBe brief.<|im_end|>\n"), ""
    images: tuple[Image, ...] = ()
    turns: list[Generation] = []
    for turn in range(4):
        images = (*images, numbered(number % 20 + turn)) if turn % 2 else images
        text += said_by_user(turn)
        prompt = [*held, *ids_of(said_by_user(turn))] if mode == "incremental" else ids_of(text)
        request = replace(episode("talk", number), sampling_params=SamplingParams(max_new_tokens=40, extra=ASKED))
        reply = await engine.generate(
            GenerateRequest(
                input_ids=prompt, sampling_params=request.sampling_params, session_id=request.uid, images=images
            )
        )
        turns.append(reply.as_generation(prompt, images=tuple(image.sha256 for image in images)))
        held = [*prompt, *reply.output_ids, *ids_of("\n")]
        text += tokenizer.decode(reply.output_ids) + "\n"
    return Trajectory(
        uid=request.uid,
        instance_id="talk",
        messages=[{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}],
        reward=1.0,
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.STOP,
        generations=turns,
        images=images,
    )


async def test_no_false_alarm_over_two_hundred_clean_episodes() -> None:
    async with running(SETTINGS) as url:
        engine = make_engine(url, tokenizer=tokenizer)
        try:
            await engine.check_records(SamplingParams(max_new_tokens=1, extra=ASKED))
            trajectories = await asyncio.gather(
                *(talked(engine, number, mode) for mode in ("incremental", "history") for number in range(100))
            )
            assert engine.fidelity == EngineFidelity(text=PromptIntegrity.EXACT, images=PromptIntegrity.EXACT)
        finally:
            await engine.close()
    prompts, met = counted(trajectories)
    assert (prompts["equal"], prompts["checked"]) == (800, 800)
    assert not any(prompts[name] for name in ("differing", "unknown", "untrained", "forked", "extra_tokens"))
    for name in ("dummies", "image_mismatches", "engine_image_mismatches", "images_missing", "record_problems"):
        assert not met[name], name


@pytest.mark.parametrize("mode", ["incremental", "history"])
async def test_an_engine_that_re_tokenises_earns_the_same_and_costs_no_trajectory(mode: str) -> None:
    async with running(SETTINGS) as engine_url, changing(engine_url, retokenised(tokenizer)) as url:
        (exact, _), (changed, fidelity) = await played(engine_url, mode, 1), await played(url, mode, 1)
    assert fidelity is not None
    assert fidelity.images is PromptIntegrity.CHANGED
    rewards = [trajectory.reward for trajectory in exact]
    assert [trajectory.reward for trajectory in changed] == rewards
    assert len(set(rewards)) > 1
    of_exact, of_changed = counted(exact), counted(changed)
    assert of_exact[0]["differing"] == of_changed[0]["unknown"] == of_changed[0]["untrained"] == 0
    assert (of_changed[0]["differing"] > 0) == (mode == "incremental"), "a history is rendered again: it is canonical"
    assert of_changed[1]["dummies"] == of_exact[1]["dummies"] == 0
