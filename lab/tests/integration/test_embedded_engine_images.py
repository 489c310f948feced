"""The embedded engine with a tiny model that sees: the contract, and log-probs against a plain forward pass."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.types import Image, SamplingParams
from tests.demo_tokens import chat_ids, tokenizer
from tests.engine_contracts import SglangServerContract, VisionContract

torch: Any = pytest.importorskip("torch", reason="the embedded engine needs torch")

from transformers import AutoImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration  # noqa: E402 - needs torch

from rollout_buffer_lab.embedded_engine.server import running  # noqa: E402 - below the skip
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings  # noqa: E402 - below the skip

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = EngineSettings(retry_timeout_s=10.0, deadline_s=50.0, backoff_first_s=0.02, backoff_longest_s=0.1)
PAD: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def picture(width: int, height: int, red: int = 20) -> Image:
    file = io.BytesIO()
    shades = PillowImage.linear_gradient("L").resize((width, height))
    PillowImage.merge("RGB", (shades, shades, shades.point(lambda value: value * red // 255))).save(file, "PNG")
    return Image(data=file.getvalue())


@dataclass(frozen=True)
class Seeing:
    """A model that sees, in memory and on disk, and what prepares its images."""

    model: Any
    processor: Any
    folder: Path

    def recomputed(self, request: GenerateRequest, reply: GenerateReply) -> list[float]:
        """The reply's log-probs by one plain forward pass over prompt, images and output, the biased token left out."""
        made = [
            self.processor(images=[PillowImage.open(io.BytesIO(image.data)).convert("RGB")], return_tensors="pt")
            for image in request.images
        ]
        sizes = iter([int(one["image_grid_thw"].prod()) // 4 for one in made])
        runs = [[token] * next(sizes) if token == PAD else [token] for token in request.input_ids]
        prompt = [token for run in runs for token in run]
        ids = torch.tensor([[*prompt, *reply.output_ids]])
        with torch.no_grad():
            output = self.model(
                input_ids=ids,
                mm_token_type_ids=(ids == PAD).int(),
                pixel_values=torch.cat([one["pixel_values"] for one in made]),
                image_grid_thw=torch.cat([one["image_grid_thw"] for one in made]),
            )
        logits = output.logits[0, len(prompt) - 1 : -1].float()
        logits[:, PAD] -= 1e9  # the distribution that was sampled from has no placeholder in it
        log_probs = torch.log_softmax(logits, dim=-1)
        return [float(line[token]) for line, token in zip(log_probs, reply.output_ids, strict=True)]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    torch.manual_seed(4)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.05,
    }
    special = {
        "image_token_id": PAD,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
    folder = tmp_path_factory.mktemp("seeing")
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return Seeing(model, AutoImageProcessor.from_pretrained(folder), folder)


@pytest.fixture
async def base_url(seeing: Seeing) -> AsyncIterator[str]:
    async with running(EmbeddedEngineSettings(model_path=seeing.folder, port=0, seed=7, device="cpu")) as url:
        yield url


@pytest.fixture
async def engine(base_url: str) -> AsyncIterator[Engine]:
    engine = SglangEngine(base_url, QUICK)
    yield engine
    await engine.close()


def turn(prompt: Sequence[int], images: Sequence[Image], most: int = 30) -> GenerateRequest:
    bias = {str(PAD): -1e9}  # as an episode does: one sampled placeholder would break the next turn
    params = SamplingParams(max_new_tokens=most, temperature=1.0, extra={"ignore_eos": True, "logit_bias": bias})
    return GenerateRequest(input_ids=tuple(prompt), sampling_params=params, session_id="s", images=tuple(images))


class TestSglangEngineWithASeeingModel(SglangServerContract, VisionContract):
    prompt_ids = chat_ids("Solve x + 5 = 12")
    image_prompt_ids = chat_ids(f"One: {VISION} Two: {VISION} What is 2 + 2?")
    images = (picture(64, 128), picture(128, 64))
    tokens_of_a_long_turn = 600


async def test_log_probs_behind_images_are_those_of_a_plain_forward_pass(engine: Engine, seeing: Seeing) -> None:
    """Also of texts that decode in the same passes, and of prompts whose images have other sizes."""
    shown = [
        turn(chat_ids(f"{VISION} What is this?"), [picture(150, 333)]),
        turn(chat_ids("No picture at all."), []),
        turn(chat_ids(f"Now {VISION} and {VISION}"), [picture(64, 128), picture(300, 200)], most=50),
        turn(chat_ids("And again none, but more words than before."), [], most=40),
    ]
    replies = await asyncio.gather(*map(engine.generate, shown))
    for request, reply in zip(shown, replies, strict=True):
        if request.images:
            assert reply.output_log_probs == pytest.approx(seeing.recomputed(request, reply), abs=1e-4)


async def test_another_picture_is_seen_as_another(engine: Engine, seeing: Seeing) -> None:
    """Of the same size, behind the same ids: no prefix of the one stands in for the other."""
    prompt = chat_ids(f"{VISION} What is this?")
    first = turn(prompt, [picture(64, 128, red=0)])
    second = turn(prompt, [picture(64, 128, red=200)])
    replies = [await engine.generate(request) for request in (first, second)]
    assert (replies[1].cached_tokens or 0) < 10
    assert replies[1].output_log_probs == pytest.approx(seeing.recomputed(second, replies[1]), abs=1e-4)
    as_the_first = seeing.recomputed(turn(prompt, first.images), replies[1])
    assert replies[1].output_log_probs != pytest.approx(as_the_first, abs=1e-2)


async def test_a_second_turn_with_a_new_picture_finds_the_first_cached(engine: Engine, seeing: Seeing) -> None:
    images = [picture(64, 128), picture(150, 333), picture(128, 64)]
    prompt = chat_ids(f"{VISION} What is this?")
    ids, cached = list(prompt), 0
    for shown in range(1, 4):
        request = turn(ids, images[:shown])
        reply = await engine.generate(request)
        assert reply.cached_tokens == cached
        assert reply.output_log_probs == pytest.approx(seeing.recomputed(request, reply), abs=1e-4)
        cached = (reply.prompt_tokens or 0) + len(reply.output_ids) - 1
        ids += [*reply.output_ids, *chat_ids(f"Now {VISION} this?")]


async def test_a_turn_aborted_behind_images_goes_on_with_the_same_log_probs(
    engine: Engine, base_url: str, seeing: Seeing
) -> None:
    contract = TestSglangEngineWithASeeingModel()
    request = turn(chat_ids(f"Now {VISION} and {VISION}"), [picture(64, 128), picture(300, 200)], most=800)
    reply = await contract.aborted_once(engine, base_url, request)
    assert len(reply.output_ids) == 800
    assert reply.output_log_probs == pytest.approx(seeing.recomputed(request, reply), abs=1e-4)
