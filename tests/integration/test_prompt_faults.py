"""What an engine does to prompts is named before its first turn, and no turn is trained after ids that it did not run.

A proxy before the scripted engine changes what it is sent, in the ways that engines were seen to. Before a real one:
``tests/integration/test_images_real_engine.py``.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http import HttpEngine
from slime_plugins.rollout_buffer.engine.image_tokens import SIZE_RULES, ImageFamily
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity, Kept, prompt_probe
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.simulation.engine.server import running
from slime_plugins.rollout_buffer.simulation.engine.settings import StandInSettings
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.types import Image, PromptCheck, SamplingParams
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
