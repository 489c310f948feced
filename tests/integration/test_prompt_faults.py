"""What an engine does to prompts is named before its first turn, and no turn is trained after ids that it did not run.

A proxy before the scripted engine changes what it is sent, in the ways that engines were seen to. Before a real one:
``tests/integration/test_images_real_engine.py``.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.cli.doctor import Examination, Finding, State, examine
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http import HttpEngine
from slime_plugins.rollout_buffer.engine.image_tokens import SIZE_RULES, ImageFamily
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, Kept, prompt_probe
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.protocol import request_models
from slime_plugins.rollout_buffer.protocol.request_models import StartPayload
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS
from slime_plugins.rollout_buffer.runner import job_runner
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.simulation.engine.server import running
from slime_plugins.rollout_buffer.simulation.engine.settings import StandInSettings
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Image,
    Instance,
    Outcome,
    PromptCheck,
    SamplingParams,
    StopReason,
    Trajectory,
)
from tests.prompt_faults import Change, changing, retokenised

TOKENIZER: Any = load_tokenizer(str(DEMO_TOKENIZER_PATH))
PROBE = prompt_probe(TOKENIZER, SIZE_RULES[ImageFamily.QWEN3_VL])
PAD = PROBE.checker.placeholder_id
SPLIT = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "the"]
WORD = TOKENIZER.encode("the", add_special_tokens=False)


def with_ids(change: Callable[[list[int]], list[int]]) -> Change:
    def changed(body: dict[str, Any]) -> None:
        body["input_ids"] = change(body["input_ids"])

    return changed


def without_system_prompt(ids: list[int]) -> list[int]:
    turns = [index for index, token in enumerate(ids) if token == TOKENIZER.convert_tokens_to_ids("<|im_start|>")]
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


FAULTS: dict[str, tuple[Change, str]] = {
    "re-tokenises": (retokenised(TOKENIZER), "decodes prompts of text and tokenises them anew"),
    "re-tokenises images": (
        only_with_images(retokenised(TOKENIZER)),
        "decodes prompts with images and tokenises them anew. slime's SGLang patch",
    ),
    "drops the system prompt": (with_ids(without_system_prompt), "drops the system prompt of prompts of text"),
    "doubles the begin token": (with_ids(lambda ids: [ids[0], *ids]), "as a second begin token would be"),
    "writes one newline more": (
        with_ids(lambda ids: [*ids[:4], *TOKENIZER.encode("\n", add_special_tokens=False), *ids[4:]]),
        "runs other ids than it is sent of prompts of text: from token 4",
    ),
    "resizes images": (with_smaller_images, "makes 189 tokens of an image of 540x1200, the model's folder 646"),
}


@asynccontextmanager
async def scripted() -> AsyncIterator[str]:
    async with running(StandInSettings(port=0)) as url:
        yield url


async def probed(url: str) -> EngineFidelity | None:
    engine = SglangEngine(url, prompts=PROBE.checker, prompt_probe=PROBE)
    try:
        return await engine.probe_prompts()
    finally:
        await engine.close()


async def test_an_engine_that_runs_what_it_is_sent_is_found_to_keep_it() -> None:
    async with scripted() as url:
        assert await probed(url) == EngineFidelity(text=Kept.KEEPS, images=Kept.KEEPS)


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_an_engine_does_to_prompts_is_named_before_its_first_turn(fault: str) -> None:
    change, sentence = FAULTS[fault]
    async with scripted() as engine_url, changing(engine_url, change) as url:
        found = await probed(url)
    assert found is not None
    assert sentence in " | ".join(found.findings)
    assert sentence in found.complaint


async def test_the_doctor_says_it_as_well(tmp_path: Path) -> None:
    async def found(url: str) -> Finding:
        examination = Examination(
            settings=AndroidWorldSettings(),
            data_dir=tmp_path,
            engine_url=url,
            tokenizer_path=DEMO_TOKENIZER_PATH,
        )
        findings = await asyncio.to_thread(examine, examination)
        return next(finding for finding in findings if finding.name == "prompts as they are sent")

    async with scripted() as engine_url, changing(engine_url, with_ids(without_system_prompt)) as url:
        well, ill = await found(engine_url), await found(url)
    assert (well.state, well.detail) == (State.OK, "it runs prompts of text and with images as they are sent")
    assert ill.state is State.MISSING
    assert "the engine drops the system prompt of prompts of text" in ill.detail


async def test_an_engine_that_says_nothing_is_not_taken_for_exact() -> None:
    async with scripted() as engine_url, changing(engine_url, lambda _: None, tells=False) as url:
        found = await probed(url)
    assert found == EngineFidelity(text=Kept.UNTOLD, images=Kept.UNTOLD)
    assert "does not say which ids it runs of prompts with images" in found.complaint


async def test_an_engine_that_changes_prompts_is_sent_none_where_exact_ones_are_required() -> None:
    async with scripted() as engine_url, changing(engine_url, retokenised(TOKENIZER)) as url:
        engine = make_engine(url, tokenizer=TOKENIZER, requires_exact_prompts=True)
        with pytest.raises(EngineError, match="exact prompts are required, and the engine decodes prompts of text"):
            await sampled(engine, SPLIT)
    async with scripted() as url:
        engine = make_engine(url, tokenizer=TOKENIZER, requires_exact_prompts=True)
        assert (await sampled(engine, SPLIT)).prompt_receipt.check is PromptCheck.EQUAL


async def test_each_turn_has_the_prompt_that_was_run_with_images_as_without() -> None:
    shown = [*SPLIT, *TOKENIZER.encode("<|vision_start|><|image_pad|><|vision_end|>", add_special_tokens=False)]
    async with scripted() as engine_url, changing(engine_url, retokenised(TOKENIZER)) as url:
        engine = make_engine(url, tokenizer=TOKENIZER)
        reply = await sampled(engine, shown, images=(picture(),))
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


def picture() -> Image:
    made = io.BytesIO()
    PillowImage.new("RGB", (128, 256)).save(made, "PNG")
    return Image(data=made.getvalue())


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
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=[{"role": "user", "content": "the"}, {"role": "assistant", "content": "!"}],
            reward=float(episode.slot),
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.STOP,
            generations=turns,
        )

    async def close(self) -> None:
        pass


@pytest.fixture
def buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffer]:
    monkeypatch.setattr(job_runner, "WATCH_INTERVAL_S", 0.02)
    buffer = Buffer(Store(tmp_path / "data"))
    yield buffer
    buffer.store.close()


async def run(buffer: Buffer, engine_url: str, generator: TwoTurns, **changes: Any) -> JobRecord:
    body = {
        "task_type": "two_turns",
        "instances": [{"instance_id": "one"}],
        "remote_engine_url": engine_url,
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "num_repeat_per_sample": 2,
        **changes,
    }
    instances = [Instance(instance_id="one", data={"instance_id": "one"})]
    job = buffer.start_job(request_models.parse(StartPayload, body), instances).job
    plugin = Plugin(
        task_type="two_turns",
        source=Path("two_turns.py"),
        needs_ray=False,
        reward_range=None,
        functions=DEFAULT_FUNCTIONS,
        create_generator=lambda: generator,
    )
    await asyncio.wait_for(JobRunner(buffer, job.key, plugin, buffer_url="http://127.0.0.1:9").run(), 120)
    return buffer.job(job.job_id)


async def test_a_job_says_what_its_engine_does_and_counts_what_it_costs(buffer: Buffer) -> None:
    """Of two turns, the second has a begin token twice: its row cannot be the first one's."""
    doubled = with_ids(lambda ids: [ids[0], *ids] if len(ids) > len(WORD) else ids)
    async with scripted() as engine_url, changing(engine_url, doubled) as url:
        job = await run(buffer, url, TwoTurns())
    told = buffer.describe(job)
    assert "as a second begin token would be" in told["prompt_findings"][0]
    prompts = told["measures"]["prompts"]
    assert (prompts["checked"], prompts["equal"], prompts["differing"], prompts["forked"]) == (4, 2, 2, 2)
    assert prompts["unknown"] == prompts["untrained"] == 0
    codes = [one["code"] for one in Views(buffer.store, "supervisor").explanation(job.job_id)["explanation"]]
    assert {"prompts_changed", "prompts_forked"} <= set(codes)
    page = metrics_page(Inspection(buffer.store), "supervisor").decode()
    assert f'rollout_buffer_prompts{{job_id="{job.job_id}",statistic="differing",task_type="two_turns"}} 2.0' in page


async def test_a_turn_that_goes_on_from_what_the_engine_ran_begins_no_row(buffer: Buffer) -> None:
    async with scripted() as engine_url, changing(engine_url, retokenised(TOKENIZER)) as url:
        job = await run(buffer, url, TwoTurns())
    prompts = buffer.describe(job)["measures"]["prompts"]
    assert (prompts["differing"], prompts["forked"], prompts["extra_tokens"]) == (2, 0, 0)


async def test_turns_of_a_silent_engine_are_trained_only_where_their_prompts_are_safe(buffer: Buffer) -> None:
    async with scripted() as engine_url, changing(engine_url, retokenised(TOKENIZER), tells=False) as url:
        job = await run(buffer, url, TwoTurns())
    prompts = buffer.describe(job)["measures"]["prompts"]
    assert (prompts["checked"], prompts["unknown"], prompts["untrained"]) == (0, 4, 2)


async def test_a_job_that_requires_exact_prompts_plays_nothing_on_an_engine_that_changes_them(buffer: Buffer) -> None:
    generator = TwoTurns()
    async with scripted() as engine_url, changing(engine_url, retokenised(TOKENIZER)) as url:
        job = await run(buffer, url, generator, exact_prompts="require")
    assert (job.state.value, generator.played) == ("failed", 0)
    assert "exact_prompts is require, and the engine decodes prompts of text and tokenises them anew" in job.cause


async def test_a_job_that_requires_exact_prompts_plays_on_an_engine_that_keeps_them(buffer: Buffer) -> None:
    async with scripted() as url:
        job = await run(buffer, url, TwoTurns(), exact_prompts="require")
    assert job.state.value == "finished"
    assert buffer.describe(job)["measures"]["prompts"]["equal"] == 4
