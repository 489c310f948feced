"""The real processors of both families, built from their numbers and loaded as a trainer loads them. Needs torch."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PillowImage
from transformers import AutoTokenizer

from slime.utils.mask_utils import Generation, pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.image_token_counts import SIZE_RULES, ImageFamily, image_tokens
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import RowImages, load_vision

torch: Any = pytest.importorskip("torch", reason="the processors of vision models need torch")
pytest.importorskip("torchvision", reason="the processors of vision models need torchvision")

PROCESSORS = {ImageFamily.QWEN3_VL: ("Qwen3VL", 16), ImageFamily.QWEN2_5_VL: ("Qwen2_5_VL", 14)}
SIZES = [(212, 471), (540, 1200), (64, 128), (1080, 600), (333, 777), (28, 28), (800, 1300)]


def checkpoint(folder: Path, family: ImageFamily) -> str:
    """Writes tokenizer and processor of a family, as a model's folder holds them."""
    import transformers

    name, patch = PROCESSORS[family]
    rule = SIZE_RULES[family]
    bounds = {"shortest_edge": rule.smallest_area, "longest_edge": rule.largest_area}
    image_processor = transformers.Qwen2VLImageProcessor(patch_size=patch, merge_size=2, size=bounds)
    video_name = "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"
    processor = getattr(transformers, f"{name}Processor")(
        image_processor=image_processor,
        tokenizer=AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH),
        video_processor=getattr(transformers, video_name)(),
    )
    processor.save_pretrained(folder)
    return str(folder)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    PillowImage.effect_noise((width, height), 60).convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", ImageFamily)
def test_a_row_is_expanded_as_the_whole_processor_would_expand_its_text(family: ImageFamily, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, family)
    vision = load_vision(path)
    assert vision is not None
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    shots = [png(width, height) for width, height in SIZES]
    names = [hashlib.sha256(shot).hexdigest() for shot in shots]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = "".join(f"Step {step}: {mark}<|im_end|>\n" for step in range(len(SIZES)))
    prompt = processor.tokenizer.encode(text, add_special_tokens=False)
    said = processor.tokenizer.encode("done<|im_end|>", add_special_tokens=False)
    (row,) = pack_training_rows([Generation(prompt, said, images=tuple(names))])

    inputs = RowImages(vision, FetchedImages(data=dict(zip(names, shots, strict=True)))).attach(row)
    pictures = [PillowImage.open(io.BytesIO(shot)) for shot in shots]
    whole = processor(text=[text], images=pictures, return_tensors="pt")

    assert inputs.row.token_ids == [*whole["input_ids"][0].tolist(), *said]
    assert inputs.train_inputs is not None
    assert torch.equal(inputs.train_inputs["image_grid_thw"], whole["image_grid_thw"])
    assert torch.equal(inputs.train_inputs["pixel_values"], whole["pixel_values"])
    tokens = sum(image_tokens(width, height, family) for width, height in SIZES)
    assert inputs.row.token_ids.count(vision.placeholder_id) == tokens


def test_pixels_may_be_halved_as_a_bfloat16_model_would_read_them(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, ImageFamily.QWEN3_VL)
    full, half = load_vision(path), load_vision(path, "bfloat16")
    assert full is not None
    assert half is not None
    picture = PillowImage.open(io.BytesIO(png(300, 500)))
    wide, narrow = full.prepare(picture).tensors, half.prepare(picture).tensors

    assert torch.equal(wide["pixel_values"].to(torch.bfloat16), narrow["pixel_values"])
    assert narrow["pixel_values"].nbytes * 2 == wide["pixel_values"].nbytes
    assert torch.equal(wide["image_grid_thw"], narrow["image_grid_thw"])


def test_a_family_that_nobody_wrote_is_an_error_that_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_plugins.rollout_buffer.trainer.vision.FAMILIES", {"OtherProcessor": None})

    with pytest.raises(ConfigError, match="Qwen3VLProcessor is not supported; supported are OtherProcessor"):
        load_vision(checkpoint(tmp_path, ImageFamily.QWEN3_VL))
