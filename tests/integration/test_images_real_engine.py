"""What the trainer computes on the delivered rows is what the engine computed: every log-prob, with every screenshot.

Android World episodes on simulated phones with a real SGLang server of a Qwen3-VL model. Each turn begins with tokens
that were really sampled and ends with a scripted reply, whose log-probs are the server's own for those tokens: a model
of random weights would never leave the first screen. Then the whole way to slime's Samples, and the same model in
transformers (fp32) over tokens and merged image tensors. The same through a proxy that decodes prompts and tokenises
them again, as slime's SGLang patch does with images.

``ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL`` names the server (started in float32) and ``ROLLOUT_BUFFER_TEST_VISION_MODEL``
the folder of its model. Needs torch, torchvision and transformers.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime.rollout.agent_rollout_samples import SampleConverter, finish_batch, rows_of
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import load_vision
from slime_plugins.rollout_buffer.types import EpisodeRequest, Trajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_body
from tests.android_world_expert import expert_replies
from tests.episode_requests import phone_episode, use_local_phones
from tests.integration.conftest import engine_url_of
from tests.prompt_faults import changing, retokenised
from tests.row_log_probs import recorded_of

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(600)]

URL_VARIABLE = "ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL"
MODEL_VARIABLE = "ROLLOUT_BUFFER_TEST_VISION_MODEL"
URL = os.environ.get(URL_VARIABLE, "").rstrip("/")
MODEL = os.environ.get(MODEL_VARIABLE, "")
if not (URL and MODEL):
    pytest.skip(f"{URL_VARIABLE} and {MODEL_VARIABLE} are not both set", allow_module_level=True)
torch: Any = pytest.importorskip("torch", reason="the log-probs are recomputed with torch")
transformers: Any = pytest.importorskip("transformers")

TOLERANCE = 1e-4
FAR = 0.02
"""A difference in nats that rounding cannot make."""
NOISE_TOKENS = 6
TASKS = (("ContactsAddContact", 0), ("SystemBrightnessMax", 1))
PAD, TURN_END, NEW_LINE = "<|image_pad|>", "<|im_end|>", "\n"


@pytest.fixture(scope="module", autouse=True)
def _server_answers() -> None:
    engine_url_of(URL_VARIABLE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()


class MutteringExpert:
    """An engine whose every turn begins with what the model samples and ends with what solves the task.

    A model with random weights would never leave the first screen. All log-probs are the server's own: of what it
    sampled as it sampled it, of the expert's words as it scores a prompt that holds them.
    """

    def __init__(self, engine: HttpEngine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        muttered = await self._engine.generate(
            replace(request, sampling_params=replace(request.sampling_params, max_new_tokens=NOISE_TOKENS))
        )
        task_name, params_idx = request.session_id.split("/")[0].rsplit("-", 1)
        said = expert_replies(task_name, int(params_idx))[self._turns[request.session_id]]
        self._turns[request.session_id] += 1
        ids = self._tokenizer.encode(f"{said}{TURN_END}", add_special_tokens=False)
        log_probs = await self._scored(request, muttered, ids)
        return replace(
            muttered,
            output_ids=(*muttered.output_ids, *ids),
            output_log_probs=(*muttered.output_log_probs, *log_probs),
            finish_reason="stop",
            weight_version_spans=(),
        )

    async def close(self) -> None:
        await self._engine.close()

    async def _scored(self, request: GenerateRequest, muttered: GenerateReply, ids: Sequence[int]) -> list[float]:
        assert muttered.prompt_tokens is not None
        prompt = request.input_ids if muttered.ran_prompt_ids is None else muttered.ran_prompt_ids
        body = {
            "input_ids": [*prompt, *muttered.output_ids, *ids],
            "image_data": [wire.encode_data_uri(image.data) for image in request.images],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": muttered.prompt_tokens + len(muttered.output_ids) - 1,
        }
        async with aiohttp.ClientSession() as session, session.post(f"{URL}/generate", json=body) as response:
            meta = (await response.json())["meta_info"]
        entries = meta["input_token_logprobs"][-len(ids) :]
        assert [entry[1] for entry in entries] == list(ids)
        return [float(entry[0]) for entry in entries]


async def played(mode: str, tokenizer: Any, url: str = URL) -> list[Trajectory]:
    """Plays each task once, in three turns; a prompt of the history mode shows two screenshots."""
    settings = EngineSettings(retry_timeout_s=60.0, deadline_s=240.0)
    engine = MutteringExpert(make_engine(url, settings, tokenizer=tokenizer, tokenizer_path=MODEL), tokenizer)
    options = {"android_world": {"rollout_mode": mode, "max_turns": 3, "max_context_len": 20_000, "history_images": 2}}
    context = GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=2, options=options)
    generator = create_generator()
    try:
        await generator.start(context)
        return await asyncio.gather(*(generator.play(request_for(name, index)) for name, index in TASKS))
    finally:
        await generator.close()
        await engine.close()


def request_for(task_name: str, params_idx: int) -> EpisodeRequest:
    uid = f"{task_name}-{params_idx}/0"
    return phone_episode(task_name, params_idx, uid, max_new_tokens=400, temperature=1.0)


def delivered(trajectories: Sequence[Trajectory]) -> list[list[Sample]]:
    """Takes trajectories over the wire and through the trainer's side, as one batch of groups of one."""
    items, images = [], {}
    for number, trajectory in enumerate(trajectories):
        body = encode_body(trajectory) | {"uid": trajectory.uid, "instance_id": trajectory.instance_id}
        items.append(wire.decode_item(body | {"reward": trajectory.reward, "group_index": number}))
        images.update({image.sha256: image.data for image in trajectory.images})
    converter = SampleConverter(Namespace(hf_checkpoint=MODEL), samples_per_group=1)
    batch = finish_batch(converter.groups(items, load_vision(MODEL), FetchedImages(data=images)), 0)
    return [rows_of(group[0]) for group in batch]


def worst_difference(
    model: Any, tokens: Sequence[int], train_inputs: Mapping[str, Any], trained: Sequence[tuple[int, float]]
) -> float:
    """The largest difference between recorded and recomputed log-probs; ``trained`` pairs positions with records."""
    ids = torch.tensor([list(tokens)])
    pads = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        logits = model(input_ids=ids, mm_token_type_ids=pads, **train_inputs).logits[0].float()
    computed = torch.log_softmax(logits, -1)
    return float(max(abs(float(computed[at - 1, ids[0, at]]) - recorded) for at, recorded in trained))


def difference_of(model: Any, sample: Sample) -> float:
    assert sample.multimodal_train_inputs is not None
    return worst_difference(model, sample.tokens, sample.multimodal_train_inputs, recorded_of(sample))


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_phones(tmp_path, monkeypatch, num_workers=2, screenshot_max_pixels=100_000)


@pytest.mark.parametrize("mode", ["incremental", "history"])
async def test_recomputed_log_probs_equal_the_recorded_ones(mode: str, tokenizer: Any, model: Any) -> None:
    trajectories = await played(mode, tokenizer)
    assert all(len(trajectory.images) == 3 for trajectory in trajectories)
    for trajectory, rows in zip(trajectories, delivered(trajectories), strict=True):
        assert "prompt_tokens_mismatch" not in trajectory.extra_info
        sampled = sum(len(generation.output_ids) for generation in trajectory.generations)
        assert sum(len(recorded_of(row)) for row in rows) == sampled > 0
        assert len(rows) == (len(trajectory.generations) if mode == "history" else 1)
        for row in rows:
            assert not row.remove_sample, row.metadata["dummy_reason"]
            assert difference_of(model, row) < TOLERANCE
        assert encode_body(trajectory)["extra_info"]["prompts"]["unknown"] == 0


@pytest.mark.parametrize("mode", ["incremental", "history"])
async def test_recomputed_log_probs_equal_those_of_a_re_tokenising_engine(
    mode: str, tokenizer: Any, model: Any
) -> None:
    async with changing(URL, retokenised(tokenizer)) as url:
        trajectories = await played(mode, tokenizer, url)
    differing = 0
    for trajectory, rows in zip(trajectories, delivered(trajectories), strict=True):
        body = encode_body(trajectory)
        differing += body["extra_info"]["prompts"]["differing"]
        assert body["extra_info"]["prompts"]["unknown"] == 0
        sampled = sum(len(generation.output_ids) for generation in trajectory.generations)
        assert sum(len(recorded_of(row)) for row in rows) == sampled > 0
        assert max(difference_of(model, row) for row in rows) < TOLERANCE
    if mode == "history":
        return  # what was said is rendered again for every prompt: its tokens are the tokenizer's own
    assert differing
    worst = 0.0
    for trajectory in trajectories:
        sent = [
            generation
            if generation.prompt_receipt is None or generation.prompt_receipt.sent_ids is None
            else replace(generation, prompt_ids=generation.prompt_receipt.sent_ids)
            for generation in trajectory.generations
        ]
        (rows,) = delivered([replace(trajectory, generations=sent)])
        worst = max(worst, *(difference_of(model, row) for row in rows))
    assert worst > FAR, "trained after what was sent, the same tokens have other log-probs: the check above can fail"


async def test_a_swapped_image_a_lost_newline_or_a_shifted_grid_would_be_seen(tokenizer: Any, model: Any) -> None:
    """The check above can fail: each of these is one small mistake of the kind that it is there for."""
    trajectory, _ = await played("incremental", tokenizer)
    ((sample,),) = delivered([trajectory])
    inputs, trained = dict(sample.multimodal_train_inputs or {}), recorded_of(sample)
    pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
    first, second = (int(one.prod()) for one in grid[:2])
    swapped = torch.cat([pixels[first : first + second], pixels[:first], pixels[first + second :]])
    shifted = grid.clone()
    shifted[0] = grid[0][[0, 2, 1]]
    lost = sample.tokens.index(tokenizer.convert_tokens_to_ids(TURN_END), trained[0][0]) + 1
    assert tokenizer.decode([sample.tokens[lost]]) == NEW_LINE
    shorter = [*sample.tokens[:lost], *sample.tokens[lost + 1 :]]
    moved = [(at - (at > lost), log_prob) for at, log_prob in trained]

    assert worst_difference(model, sample.tokens, inputs, trained) < TOLERANCE
    assert worst_difference(model, sample.tokens, inputs | {"pixel_values": swapped}, trained) > FAR
    assert worst_difference(model, sample.tokens, inputs | {"image_grid_thw": shifted}, trained) > FAR
    assert worst_difference(model, shorter, inputs, moved) > FAR
