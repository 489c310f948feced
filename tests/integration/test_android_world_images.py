"""An episode of three turns, position by position: tokens, mask, log-probs and images, from phone to trainer.

The expected sequence: prompt, reply 1, observation 2, reply 2, observation 3, reply 3; every screenshot a run of image
tokens in its place, replies trained and nothing else.
"""

from __future__ import annotations

import importlib
import io
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as PillowImage

from rollout_buffer_lab.mock_trainer import flat_samples, trainer_args
from slime.rollout.agent_rollout_samples import SampleConverter
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_size, image_tokens
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import first_turn_message, system_message
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import QwenVision
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_body
from tests.android_world_expert import expert_replies, turn_of
from tests.demo_tokens import tokenizer
from tests.episode_requests import phone_episode, use_local_phones

TASK, PARAMS_IDX = "ContactsAddContact", 0
IMAGE = "<|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"


def vision() -> QwenVision:
    """Qwen3-VL's image processor on Pillow and numpy, with the demo tokenizer's ids."""
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that torch is missing, which is the point here
        image_processor = module.Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, size={"shortest_edge": 65_536, "longest_edge": 16_777_216}
        )
    processor = SimpleNamespace(image_processor=image_processor, tokenizer=tokenizer)
    return QwenVision(processor, concat=np.concatenate, tensor_type="np")


@pytest.fixture
async def trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trajectory]:
    use_local_phones(tmp_path, monkeypatch, num_workers=1, screenshot_max_pixels=100_000)
    engine = FakeEngine(lambda request: expert_replies(TASK, PARAMS_IDX)[turn_of(request)], tokenizer=tokenizer)
    generator = create_generator()
    options = {"android_world": {"max_turns": 3}}
    context = GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=1, options=options)
    try:
        await generator.start(context)
        yield await generator.play(phone_episode(TASK, PARAMS_IDX, uid="u", max_new_tokens=512))
    finally:
        await generator.close()


def segments(trajectory: Trajectory) -> list[tuple[str, bool]]:
    """The expected sequence as texts, each with whether it was sampled. Written without the template."""
    runs = [
        PAD * image_tokens(*(image_size(image.data) or (0, 0)), ImageFamily.QWEN3_VL) for image in trajectory.images
    ]
    said = expert_replies(TASK, PARAMS_IDX)
    system = system_message()["content"]
    parts = first_turn_message(str(trajectory.extra_info["goal"]), "0")["content"]
    task = "".join(IMAGE.format(runs[0]) if part["type"] == "image_url" else part["text"] for part in parts)
    opening = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n"
    sequence = [(opening, False), (f"{said[0]}<|im_end|>", True)]
    for turn in (1, 2):
        observation = f"Step {turn + 1} of 3: {IMAGE.format(runs[turn])}"
        sequence += [
            (f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n", False),
            (f"{said[turn]}<|im_end|>", True),
        ]
    return sequence


async def test_three_turns_have_the_tokens_mask_log_probs_and_images_of_each_position(trajectory: Trajectory) -> None:
    names = [image.sha256 for image in trajectory.images]
    assert len(set(names)) == 3
    assert [list(generation.images or ()) for generation in trajectory.generations] == [names[:1], names[:2], names]
    body = json.loads(json.dumps(encode_body(trajectory)))
    item = wire.decode_item(body | {"uid": "u", "instance_id": "i", "reward": 0.5, "group_index": 0})
    images = FetchedImages(data={image.sha256: image.data for image in trajectory.images})
    converter = SampleConverter(trainer_args(hf_checkpoint=str(DEMO_TOKENIZER_PATH)), samples_per_group=1)
    (sample,) = flat_samples(converter.groups([item], vision(), images))

    tokens: list[int] = []
    mask: list[int] = []
    for text, sampled in segments(trajectory):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [int(sampled)] * len(ids)
    prompt_length = mask.index(1)
    assert sample.tokens == tokens
    assert sample.loss_mask == mask[prompt_length:]
    assert sample.response_length == len(tokens) - prompt_length
    recorded = [log_prob for generation in trajectory.generations for log_prob in generation.output_log_probs or ()]
    assert sample.rollout_log_probs is not None
    columns = zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
    assert [log_prob for log_prob, trained in columns if trained] == recorded

    inputs = sample.multimodal_train_inputs
    assert inputs is not None
    alone = [vision().prepare(PillowImage.open(io.BytesIO(image.data))) for image in trajectory.images]
    for name in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(inputs[name], np.concatenate([one.tensors[name] for one in alone]))
