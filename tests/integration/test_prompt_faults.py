"""What an engine does to prompts is named before its first turn, and no turn is trained after ids that it did not run.

A proxy before the scripted engine changes what it is sent, in the ways that engines were seen to. Before a real one:
``tests/integration/test_images_real_engine.py``.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image as PillowImage

from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.scripted_engine.token_records import LAYERS, TOP_K
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.host_checks import Finding, State
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine import factory
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.image_token_counts import SIZE_RULES, ImageFamily
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, prompt_probe
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.token_records import EXPERTS_KEY
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.vision import ImageFeatures
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Image,
    PromptCheck,
    SamplingParams,
    Trajectory,
)
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.demo_tokens import ids_of, tokenizer
from tests.pictures import picture
from tests.prompt_faults import Change, changing, retokenised, unchanged, without_ids
from tests.support import plugin_of, start_played, trajectory
from tests.unit.trainer.test_agent_rollout_multimodal import TableVision

PROBE = prompt_probe(tokenizer, SIZE_RULES[ImageFamily.QWEN3_VL])
SPLIT = [ids_of(letter)[0] for letter in "the"]
NO_MASKS = MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None)
MASKS = MaskSettings(tokenizer_path=str(DEMO_TOKENIZER_PATH), loss_mask_type="qwen", source=None)
WORD = ids_of("the")


def with_ids(change: Callable[[list[int]], list[int]]) -> Change:
    def changed(body: dict[str, Any]) -> None:
        body["input_ids"] = change(body["input_ids"])

    return changed


def without_system_prompt(ids: list[int]) -> list[int]:
    turns = [index for index, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|im_start|>")]
    return ids[turns[1] :] if len(turns) > 1 else ids


def only_with_images(change: Change) -> Change:
    def changed(body: dict[str, Any]) -> None:
        if body.get("image_data"):
            change(body)

    return changed


def with_smaller_images(body: dict[str, Any]) -> None:
    """As an engine whose ``max_pixels`` is 200,000."""
    smaller = []
    for uri in body.get("image_data", ()):
        picture = PillowImage.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))
        scale = min(1.0, (200_000 / (picture.width * picture.height)) ** 0.5)
        made = io.BytesIO()
        picture.resize((int(picture.width * scale), int(picture.height * scale))).save(made, "PNG")
        smaller.append("data:image/png;base64," + base64.b64encode(made.getvalue()).decode())
    if smaller:
        body["image_data"] = smaller


def experts_moved(by: int) -> Change:
    """Reports for each pass the experts of the pass ``by`` places after it, at the ends those of the first or last."""

    def change(answer: dict[str, Any]) -> None:
        told = base64.b64decode(answer["meta_info"]["routed_experts"])
        width = 4 * LAYERS * TOP_K
        passes = [told[at : at + width] for at in range(0, len(told), width)]
        moved = [passes[min(max(0, at + by), len(passes) - 1)] for at in range(len(passes))]
        answer["meta_info"]["routed_experts"] = base64.b64encode(b"".join(moved)).decode()

    return change


async def said_of_engine(change: Change) -> str:
    """The complaint about an engine that changes what it is sent, before its first turn."""
    async with scripted() as engine_url, changing(engine_url, change) as url:
        found = await probed(url)
    assert found is not None
    return found.complaint


async def said_of_experts(change_answer: Change) -> str:
    """The complaint about an engine that reports other experts than it used, before its first turn."""
    params = SamplingParams(max_new_tokens=1, extra={EXPERTS_KEY: True})
    settings = ScriptedEngineSettings(port=0, token_records=True)
    async with running(settings) as engine_url, changing(engine_url, unchanged, change_answer) as url:
        engine = make_engine(url)
        try:
            await engine.check_records(params)
        except EngineError as error:
            return error.message
        finally:
            await engine.close()
    return ""


class BlindVision(TableVision):
    """A vision family that is never to be asked for tensors."""

    def prepare(self, picture: Any) -> ImageFeatures:
        raise AssertionError("tensors were made of a picture that the engine was not sent")


async def said_of_swapped_pictures() -> str:
    """What the trainer says of two siblings each of which names the other's picture, of the same size."""
    shown = ids_of("<|vision_start|><|image_pad|><|vision_end|>")
    pictures = [picture(128, 256, "black"), picture(128, 256, "maroon")]
    async with scripted() as url:
        replies = [await sampled(make_engine(url, tokenizer=tokenizer), shown, images=(one,)) for one in pictures]
    assert replies[0].prompt_receipt.image_tokens == replies[1].prompt_receipt.image_tokens
    named = [
        reply.as_generation(shown, images=(one.sha256,)) for reply, one in zip(replies, pictures[::-1], strict=True)
    ]
    members = [
        RolloutItem(uid=f"a/{slot}", instance_id="a", group_index=0, reward=1.0, generations=wire_copy([one]))
        for slot, one in enumerate(named)
    ]
    builder = RowBuilder(RowSettings(samples_per_group=2, masks=NO_MASKS, report_drift=False))
    images = FetchedImages(data={one.sha256: one.data for one in pictures})
    (group,) = builder.groups(members, BlindVision(), images)
    assert (builder.counts["image_mismatches"], group.rows) == (2, [])
    return "; ".join(str(trajectory.dummy_reason) for trajectory in group.trajectories)


async def said_of_lost_thinking() -> str:
    """The trainer's counts for a client that sent its history without what the policy thought."""
    first = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    thought = ids_of("<think>\nwell\n</think>\n\nhello<|im_end|>")
    told = ids_of("hello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n")
    last = ids_of("bye<|im_end|>")
    turns = [Generation(first, thought, [-0.5] * len(thought)), Generation([*first, *told], last, [-0.5] * len(last))]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "bye"},
    ]
    item = RolloutItem(
        uid="a/0", instance_id="a", group_index=0, reward=1.0, messages=messages, generations=wire_copy(turns)
    )
    builder = RowBuilder(RowSettings(samples_per_group=1, masks=MASKS))
    (group,) = builder.groups([item])
    assert len(group.rows) == 2, "what the second turn was sampled after is a row of its own"
    return " ".join(builder.counts)


def wire_copy(generations: list[Generation]) -> tuple[Generation, ...]:
    return wire.decode_generations(wire.encode_generations(generations))


FAULTS: dict[str, tuple[Callable[[], Awaitable[str]], str]] = {
    "a re-tokenising engine": (
        lambda: said_of_engine(retokenised(tokenizer)),
        "decodes prompts of text and tokenises them again",
    ),
    "an engine that re-tokenises prompts with images": (
        lambda: said_of_engine(only_with_images(retokenised(tokenizer))),
        "decodes prompts with images and tokenises them again. slime's SGLang patch",
    ),
    "a dropped system prompt": (
        lambda: said_of_engine(with_ids(without_system_prompt)),
        "drops the system prompt of prompts of text",
    ),
    "a duplicated begin token": (
        lambda: said_of_engine(with_ids(lambda ids: [ids[0], *ids])),
        "like a second begin token",
    ),
    "a template with one newline more": (
        lambda: said_of_engine(with_ids(lambda ids: [*ids[:4], *ids_of("\n"), *ids[4:]])),
        "runs other ids than it is sent of prompts of text: from token 4",
    ),
    "another max_pixels": (
        lambda: said_of_engine(with_smaller_images),
        "makes 189 tokens of an image of 540x1200, where the model's folder makes 646",
    ),
    "a picture swapped between siblings": (said_of_swapped_pictures, "image 0 of turn 0 is"),
    "routes shifted by one token": (
        lambda: said_of_experts(experts_moved(-1)),
        "prompts that differ from tokens 4, 8, 12 on have other experts from 5, 9, 13 on",
    ),
    "routes shifted by one token the other way": (
        lambda: said_of_experts(experts_moved(1)),
        "prompts that differ from tokens 4, 8, 12 on have other experts from 3, 7, 11 on",
    ),
    "thinking dropped from history": (said_of_lost_thinking, "token_drift/think_stripped"),
}
"""Each fault: how it is planted, and what is said about it before anything is trained."""


@asynccontextmanager
async def scripted() -> AsyncIterator[str]:
    async with running(ScriptedEngineSettings(port=0)) as url:
        yield url


async def probed(url: str) -> EngineFidelity | None:
    engine = SglangEngine(url, prompts=PROBE.checker, prompt_probe=lambda: PROBE)
    try:
        return await engine.probe_prompts()
    finally:
        await engine.close()


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_is_named_before_the_first_training_step(fault: str) -> None:
    plant, sentence = FAULTS[fault]
    assert sentence in await plant()


async def test_the_doctor_names_what_an_engine_does_to_prompts_as_well(tmp_path: Path) -> None:
    async def found(url: str) -> Finding:
        examination = Examination(
            settings=AndroidWorldSettings(), data_dir=tmp_path, engine_url=url, tokenizer_path=DEMO_TOKENIZER_PATH
        )
        findings = await asyncio.to_thread(examine, examination)
        return next(finding for finding in findings if finding.name == "prompts as they are sent")

    async with scripted() as engine_url, changing(engine_url, with_ids(without_system_prompt)) as url:
        well, ill = await found(engine_url), await found(url)
    assert (well.state, well.detail) == (State.OK, "it runs prompts of text and with images as they are sent")
    assert ill.state is State.MISSING
    assert "the engine drops the system prompt of prompts of text" in ill.detail


async def test_an_engine_that_changes_prompts_is_sent_none_where_exact_ones_are_required() -> None:
    async with scripted() as engine_url, changing(engine_url, retokenised(tokenizer)) as url:
        engine = make_engine(url, tokenizer=tokenizer, requires_exact_prompts=True)
        with pytest.raises(EngineError, match="exact prompts are required, but the engine decodes prompts of text"):
            await sampled(engine, SPLIT)
    async with scripted() as url:
        engine = make_engine(url, tokenizer=tokenizer, requires_exact_prompts=True)
        assert (await sampled(engine, SPLIT)).prompt_receipt.check is PromptCheck.EQUAL


async def test_the_probe_is_built_at_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Mock(return_value=PROBE)
    monkeypatch.setattr(factory, "prompt_probe", build)
    async with scripted() as url:
        engine = make_engine(url, tokenizer=tokenizer)
        build.assert_not_called()
        await sampled(engine, SPLIT)
    build.assert_called_once()


async def test_each_turn_has_the_prompt_that_was_run_with_images_as_without() -> None:
    shown = [*SPLIT, *ids_of("<|vision_start|><|image_pad|><|vision_end|>")]
    async with scripted() as engine_url, changing(engine_url, retokenised(tokenizer)) as url:
        engine = make_engine(url, tokenizer=tokenizer)
        reply = await sampled(engine, shown, images=(picture(128, 256),))
    assert reply.ran_prompt_ids == [*WORD, *shown[3:]]
    assert reply.prompt_receipt.image_tokens == (72,)


async def sampled(engine: HttpEngine, ids: list[int], images: tuple[Image, ...] = ()) -> Any:
    request = GenerateRequest(
        input_ids=ids, sampling_params=SamplingParams(max_new_tokens=2), session_id="one", images=images
    )
    try:
        return await engine.generate(request)
    finally:
        await engine.close()


class TwoTurns:
    """A generator whose second prompt goes on from the first, and holds words that no tokenizer would write so."""

    def __init__(self) -> None:
        self.played = 0

    async def start(self, context: GeneratorContext) -> None:
        self._engine = context.engine

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        self.played += 1
        turns: list[Generation] = []
        held = WORD
        for _ in range(2):
            reply = await self._engine.generate(
                GenerateRequest(
                    input_ids=held, sampling_params=SamplingParams(max_new_tokens=2), session_id=episode.uid
                )
            )
            turns.append(reply.as_generation(held))
            held = [*held, *reply.output_ids, *SPLIT]
        return trajectory(episode.uid, episode.instance.instance_id, float(episode.slot), generations=turns)

    async def close(self) -> None:
        pass


@pytest.fixture
def buffer(real_time_buffer: Buffer) -> Buffer:
    return real_time_buffer


async def run(buffer: Buffer, engine_url: str, generator: TwoTurns, **changes: Any) -> JobRecord:
    changes = {"remote_engine_url": engine_url, "tokenizer_path": str(DEMO_TOKENIZER_PATH), **changes}
    job = start_played(buffer, ("one",), task_type="two_turns", **changes)
    plugin = plugin_of("two_turns", lambda: generator)
    await asyncio.wait_for(JobRunner(buffer, job.key, plugin, buffer_url="http://127.0.0.1:9").run(), 120)
    return buffer.job(job.job_id)


async def test_a_job_says_what_its_engine_does_and_counts_what_it_costs(buffer: Buffer) -> None:
    """Of two turns, the second has a begin token twice: its row cannot be the first one's."""
    doubled = with_ids(lambda ids: [ids[0], *ids] if len(ids) > len(WORD) else ids)
    async with scripted() as engine_url, changing(engine_url, doubled) as url:
        job = await run(buffer, url, TwoTurns())
    told = describe_job(buffer.store, job)
    assert "like a second begin token" in told["prompt_findings"][0]
    prompts = told["measures"]["prompts"]
    assert (prompts["checked"], prompts["equal"], prompts["differing"], prompts["forked"]) == (4, 2, 2, 2)
    assert prompts["unknown"] == prompts["untrained"] == 0
    codes = [one.code for one in Views(buffer.store, "supervisor").explanation(job.job_id)["explanation"]]
    assert {"prompts_changed", "prompts_forked"} <= set(codes)
    page = metrics_page(buffer.store).decode()
    assert f'rollout_buffer_prompts{{job_id="{job.job_id}",statistic="differing",task_type="two_turns"}} 2.0' in page


async def test_turns_of_a_silent_engine_are_trained_only_where_their_prompts_are_safe(buffer: Buffer) -> None:
    async with scripted() as engine_url, changing(engine_url, retokenised(tokenizer), without_ids) as url:
        job = await run(buffer, url, TwoTurns())
    prompts = describe_job(buffer.store, job)["measures"]["prompts"]
    assert (prompts["checked"], prompts["unknown"], prompts["untrained"]) == (0, 4, 2)


async def test_a_job_that_requires_exact_prompts_plays_nothing_on_an_engine_that_changes_them(buffer: Buffer) -> None:
    generator = TwoTurns()
    async with scripted() as engine_url, changing(engine_url, retokenised(tokenizer)) as url:
        job = await run(buffer, url, generator, exact_prompts="require")
    assert (job.state.value, generator.played) == ("failed", 0)
    assert "exact_prompts is require, and the engine decodes prompts of text and tokenises them again" in job.cause
