"""Rows get their images: expanded in place, in the right order, and refused when anything does not agree.

The image processor is the real one of transformers, on Pillow and numpy; the tokenizer knows five tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import flat_samples, trainer_args
from slime.rollout.agent_rollout_samples import SampleConverter, finish_batch
from slime.utils.mask_utils import Generation, PromptCheck, PromptReceipt, TrainingRow, pack_training_rows
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.image_token_counts import ImageFamily, image_tokens
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.row_builder import images_of, images_of_rows
from slime_plugins.rollout_buffer.trainer.vision import (
    FAMILIES,
    ImageFeatures,
    ImageMismatchError,
    ImageUnavailableError,
    QwenVision,
    RowImages,
    tensor_bytes,
)
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.pictures import png

START, END, PAD, VIDEO = 901, 902, 903, 904
VOCABULARY = {"<|vision_start|>": START, "<|vision_end|>": END, "<|image_pad|>": PAD, "<|video_pad|>": VIDEO}
TURN_END, NEW_LINE = 905, 906
PIL_PROCESSORS = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"

QWEN3 = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
QWEN2_5 = {"patch_size": 14, "size": {"shortest_edge": 3_136, "longest_edge": 12_845_056}}


class CountingProcessor:
    """The real image processor; counts its calls."""

    def __init__(self, **numbers: Any) -> None:
        module = importlib.import_module(PIL_PROCESSORS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that torch is missing, which is the point here
            self._processor = module.Qwen2VLImageProcessorPil(merge_size=2, **numbers)
        self.merge_size = 2
        self.calls = 0

    def __call__(self, **arguments: Any) -> Any:
        self.calls += 1
        return self._processor(**arguments)


def vision_of(numbers: dict[str, Any]) -> tuple[QwenVision, CountingProcessor]:
    image_processor = CountingProcessor(**numbers)
    tokenizer = SimpleNamespace(convert_tokens_to_ids=VOCABULARY.__getitem__)
    processor = SimpleNamespace(image_processor=image_processor, tokenizer=tokenizer)
    return QwenVision(processor, concat=np.concatenate, tensor_type="np"), image_processor


@pytest.fixture
def vision() -> QwenVision:
    return vision_of(QWEN3)[0]


SCREENS = [
    png((64, 128), (200, 40, 80)),
    png((64, 128), (100, 40, 80)),
    png((128, 64), (0, 40, 80)),
    png((270, 600), (50, 40, 80)),
]
NAMES = [hashlib.sha256(data).hexdigest() for data in SCREENS]
TOKENS = [72, 72, 72, 152]
"""How many tokens Qwen3-VL's processor makes of each of ``SCREENS``."""
ALL = FetchedImages(data=dict(zip(NAMES, SCREENS, strict=True)))


def shown(*text: int) -> list[int]:
    """An observation: text, then one image."""
    return [*text, START, PAD, END]


def episode(images: Sequence[int], *, counted: bool = True) -> tuple[Generation, ...]:
    """An append-only episode that sees one of the screens in each turn and says two tokens."""
    generations: list[Generation] = []
    held: list[int] = []
    for turn in range(len(images)):
        held = [*held, *([NEW_LINE] if turn else []), *shown(10 + turn)]
        seen = images[: turn + 1]
        expanded = len(held) + sum(TOKENS[image] - 1 for image in seen)
        names = tuple(NAMES[image] for image in seen)
        log_probs = [-0.5 - turn, -0.25 - turn]
        generations.append(
            Generation(
                list(held), [100 + turn, TURN_END], log_probs, images=names, prompt_tokens=expanded if counted else None
            )
        )
        held = [*held, 100 + turn, TURN_END]
    return tuple(generations)


def messages_of(images: Sequence[int]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for image in images:
        part = {"type": "image_url", "image_url": {"url": f"sha256:{NAMES[image]}"}}
        messages += [{"role": "user", "content": [part]}, {"role": "assistant", "content": "said"}]
    return messages


def only_row(generations: Sequence[Generation]) -> TrainingRow:
    (row,) = pack_training_rows(generations)
    return row


# --- one row ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numbers", "family"), [(QWEN3, ImageFamily.QWEN3_VL), (QWEN2_5, ImageFamily.QWEN2_5_VL)])
def test_both_families_expand_as_their_size_rule_says(numbers: dict[str, Any], family: ImageFamily) -> None:
    vision, _ = vision_of(numbers)
    generations = episode([0, 3], counted=False)
    inputs = RowImages(vision, ALL).attach(only_row(generations), generations)

    assert inputs.train_inputs is not None
    expected = image_tokens(64, 128, family) + image_tokens(270, 600, family)
    assert inputs.row.token_ids.count(PAD) == expected
    patch = numbers["patch_size"]
    assert inputs.train_inputs["pixel_values"].shape == (4 * expected, 3 * 2 * patch * patch)


@given(st.lists(st.one_of(st.integers(1, 50), st.sampled_from(range(4)).map(lambda image: ("image", image)))))
def test_expansion_changes_nothing_but_the_length_of_the_runs(parts: list[Any]) -> None:
    """Images before, between and after what was sampled."""
    ids, mask, images = [], [], []
    for part in parts:
        image = part[1] if isinstance(part, tuple) else None
        ids += [START, PAD, END] if image is not None else [part]
        mask += [0, 0, 0] if image is not None else [part % 2]
        images += [] if image is None else [image]
    log_probs = [-float(token) if trained else 0.0 for token, trained in zip(ids, mask, strict=True)]
    row = TrainingRow(ids, mask, log_probs, 0, (), images=tuple(NAMES[image] for image in images))
    inputs = RowImages(TABLE, ALL).attach(row)

    assert inputs.row.log_probs is not None
    after = list(zip(inputs.row.token_ids, inputs.row.loss_mask, inputs.row.log_probs, strict=True))
    before = list(zip(ids, mask, log_probs, strict=True))
    assert [column for column in after if column[0] != PAD] == [column for column in before if column[0] != PAD]
    assert [column for column in after if column[0] == PAD] == [(PAD, 0, 0.0)] * sum(TOKENS[i] for i in images)
    trained = [at for at, column in enumerate(after) if column[1]]
    assert inputs.row.response_length == (len(after) - trained[0] if trained else 0)


class TableVision:
    """A family that looks its numbers up: another one is three methods."""

    placeholder_id = PAD

    def prepare(self, picture: Any) -> ImageFeatures:
        return ImageFeatures(tensors={"size": np.array([picture.size])}, tokens=152 if picture.width == 270 else 72)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes every row."""

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        return {"size": np.concatenate([one.tensors["size"] for one in features])}


TABLE = TableVision()


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(vision: QwenVision, generations: Sequence[Generation], **changes: Any) -> str:
    """Attaches the changed row and returns why it was refused."""
    row = replace(only_row(generations), **changes)
    with pytest.raises(ImageMismatchError) as caught:
        RowImages(vision, ALL).attach(row, generations)
    return str(caught.value)


def test_a_sampled_placeholder_is_refused(vision: QwenVision) -> None:
    turn = Generation(shown(1), [START, PAD, END], images=(NAMES[0],))

    assert "sampled by the model" in refused(vision, [turn], images=(NAMES[0], NAMES[1]))


@pytest.mark.parametrize("turn", [0, 1])
def test_a_prompt_that_the_engine_counted_otherwise_is_refused(vision: QwenVision, turn: int) -> None:
    generations = list(episode([0, 1]))
    counted = generations[turn].prompt_tokens
    assert counted is not None
    generations[turn] = replace(generations[turn], prompt_tokens=counted - 8)

    assert f"the engine counted {counted - 8} tokens in the prompt of turn {turn}" in refused(vision, generations)


def test_an_image_of_which_the_engine_made_other_tokens_is_named_though_the_sum_is_equal(vision: QwenVision) -> None:
    generations = list(episode([0, 1]))
    made = [vision.prepare(picture).tokens for picture in RowImages(vision, ALL).attach(only_row(generations)).pictures]
    right = PromptReceipt(PromptCheck.EQUAL, image_tokens=tuple(made))
    generations[1] = replace(generations[1], prompt_receipt=right)
    RowImages(vision, ALL).attach(only_row(generations), generations)

    moved = replace(right, image_tokens=(made[0] + 1, made[1] - 1))
    generations[1] = replace(generations[1], prompt_receipt=moved)
    assert f"the engine made {made[0] + 1} tokens of image 0 of turn 1" in refused(vision, generations)


class WrongGridProcessor(CountingProcessor):
    """Reports another grid than that of the patches that it makes."""

    def __call__(self, **arguments: Any) -> Any:
        made = super().__call__(**arguments)
        made["image_grid_thw"] = made["image_grid_thw"] + np.array([[0, 2, 0]])
        return made


def test_patches_that_do_not_fit_their_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.CountingProcessor", WrongGridProcessor)

    assert "288 patches with the grid" in refused(vision_of(QWEN3)[0], episode([0]))


def test_an_image_that_is_missing_or_none_is_named(vision: QwenVision) -> None:
    generations = episode([0])
    gone = FetchedImages(missing={NAMES[0]: "there is no such image"})
    junk = FetchedImages(data={NAMES[0]: SCREENS[0][:60]})

    with pytest.raises(ImageUnavailableError, match="there is no such image"):
        RowImages(vision, gone).attach(only_row(generations), generations)
    with pytest.raises(ImageUnavailableError, match="cannot be read"):
        RowImages(vision, junk).attach(only_row(generations), generations)


def test_an_image_of_more_pixels_than_pillow_decodes_is_refused_alone(
    vision: QwenVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Estimating the memory of a delivery must not fail the delivery."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    generations, images = episode([0]), FetchedImages(data={NAMES[0]: SCREENS[0]})

    assert tensor_bytes(vision, [NAMES[0]], images) == 0
    with pytest.raises(ImageUnavailableError, match=r"cannot be read: .* could be decompression bomb"):
        RowImages(vision, images).attach(only_row(generations), generations)


# --- where the images of a row come from -----------------------------------------------------------------------------


def test_an_item_needs_every_image_it_names_anywhere() -> None:
    item = RolloutItem(
        uid="u", instance_id="i", images=(NAMES[0],), generations=episode([1]), messages=messages_of([3])
    )

    assert images_of(item) == [NAMES[0], NAMES[1], NAMES[3]]


# --- whole items -----------------------------------------------------------------------------------------------------


def item(images: Sequence[int] = (0, 1), **changes: Any) -> RolloutItem:
    values: dict[str, Any] = {
        "uid": "u",
        "instance_id": "task",
        "messages": messages_of(images),
        "generations": episode(images),
        "images": tuple(NAMES[image] for image in images),
        "reward": 1.0,
        "group_index": 3,
    }
    return RolloutItem(**{**values, **changes})


def converted(vision: QwenVision | None, *items: RolloutItem, **arguments: Any) -> tuple[list[Sample], SampleConverter]:
    args = trainer_args(hf_checkpoint=str(DEMO_TOKENIZER_PATH), n_samples_per_prompt=len(items), **arguments)
    converter = SampleConverter(args, samples_per_group=len(items))
    return flat_samples(finish_batch(converter.groups(items, vision, ALL), 0)), converter


def test_a_sample_carries_tensors_and_expanded_tokens_of_one_count(vision: QwenVision) -> None:
    (sample,), converter = converted(vision, item())
    inputs = sample.multimodal_train_inputs

    assert inputs is not None
    assert sample.tokens.count(PAD) == sum(math.prod(grid) for grid in inputs["image_grid_thw"].tolist()) // 4 == 144
    assert sample.response_length == len(sample.loss_mask or []) == len(sample.rollout_log_probs or [])
    assert sum(sample.loss_mask or []) == 4
    assert sample.tokens[-sample.response_length] == 100
    assert sample.multimodal_inputs is None
    assert converter.counts["images"] == 2
    assert converter.counts["image_tensor_bytes"] == 2 * 288 * 1536 * 4 + 2 * 3 * 8


def test_each_row_of_a_history_gets_its_own_images(vision: QwenVision) -> None:
    turns = [
        Generation(shown(1), [5], images=(NAMES[0],)),
        Generation([2, START, PAD, END, START, PAD, END], [6], images=(NAMES[0], NAMES[3])),
        Generation(shown(3), [7], images=(NAMES[3],)),
    ]
    rows, _ = converted(vision, item([0, 3], generations=tuple(turns)))

    assert images_of_rows(item([0, 3], generations=tuple(turns))) == [NAMES[at] for at in (0, 0, 3, 3)]
    grids = [sample.multimodal_train_inputs["image_grid_thw"].tolist() for sample in rows]  # type: ignore[index]  # all have images, or this fails
    assert grids == [[[1, 24, 12]], [[1, 24, 12], [1, 38, 16]], [[1, 38, 16]]]
    assert [sample.tokens.count(PAD) for sample in rows] == [72, 224, 152]


def test_one_bad_trajectory_costs_its_siblings_nothing(vision: QwenVision) -> None:
    wrong = tuple(replace(generation, prompt_tokens=7) for generation in episode([0, 1]))
    unknown = (Generation(shown(1), [5], images=("0" * 64,)),)
    samples, converter = converted(vision, item(), item(generations=wrong), item(generations=unknown))

    assert [sample.remove_sample for sample in samples] == [False, True, True]
    assert [sample.multimodal_train_inputs is None for sample in samples] == [False, True, True]
    assert (converter.counts["image_mismatches"], converter.counts["images_missing"]) == (1, 1)
    assert converter.counts["malformed_items"] == 0


# --- the table of families -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, 0])
def test_a_processor_beside_a_tokenizer_without_the_placeholder_is_refused(answer: int | None) -> None:
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda token: answer, unk_token_id=0)
    processor = SimpleNamespace(image_processor=CountingProcessor(**QWEN3), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"no <\|image_pad\|>: it belongs to another model"):
        QwenVision(processor, concat=np.concatenate)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_processors_in_the_table_are_those_of_transformers(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert hasattr(importlib.import_module("transformers"), name)
