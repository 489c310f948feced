"""Makes a tiny Qwen3.5 with vision, a rollout that shows it pictures, and what HuggingFace says of every row.

    python vision_rows.py FOLDER

Run inside a slime checkout with our files laid over it. The model goes to ``FOLDER/model`` with a real processor, the
Samples to ``rows.pt`` as our conversion makes them of delivered items, log-probs of their responses to
``log_probs.json``. The rows differ in the number and the size of their pictures, some have none, one trajectory has two
rows, one is a dummy, and lengths are odd and even.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image as PillowImage

from slime.rollout.agent_rollout_samples import SampleConverter, finish_batch, trajectories_of
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import load_vision
from slime_plugins.rollout_buffer.wire import decode_item
from tests.loopback_buffer import probe_item

START, END, PAD = 4086, 4087, 4088
"""Ids of the demo tokenizer: the markers around a picture, and its placeholder."""
TEXT = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention", "full_attention"],
    "rope_parameters": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}
SIZES = {0: [(64, 96), (96, 64)], 1: [], 2: [(64, 64), (128, 64)], 3: [(96, 96)]}
"""Width and height of each turn's picture, by slot."""


def make_model(folder: Path) -> Any:
    """Writes the checkpoint with its processor, and returns the model."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=PAD,
        video_token_id=PAD + 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2 if weight.dim() > 1 else 0.02)
    model.save_pretrained(folder)
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 65536}
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH),
        video_processor=transformers.Qwen3VLVideoProcessor(),
    ).save_pretrained(folder)
    return model


def picture(width: int, height: int, shade: int) -> bytes:
    """Returns a PNG of one shade with a bright corner."""
    image = PillowImage.new("RGB", (width, height), (shade, 255 - shade, 90))
    image.paste((250, 250, 250), (0, 0, width // 2, height // 2))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def delivered(instance_id: str, group_index: int, slot: int, shots: dict[str, bytes]) -> dict[str, Any]:
    """Returns an item of two turns, each with its slot's picture before the reply."""
    item = probe_item(instance_id, epoch=0, slot=slot, group_index=group_index)
    item["reward"] = item["raw_reward"] = float(slot)
    first, second = item["generations"]
    first["prompt_ids"], second["prompt_ids"] = [1, 2, 3 + group_index], [5, 6 + group_index]
    names: list[str] = []
    for turn, (width, height) in zip(item["generations"], SIZES[slot], strict=False):
        shot = picture(width, height, 40 * slot + 10 * group_index)
        names.append(hashlib.sha256(shot).hexdigest())
        shots[names[-1]] = shot
        before = len(names) - 1
        turn |= {"prompt_ids": [START, PAD, END, *turn["prompt_ids"]], "images": names[-1:], "keep_images": before}
    if names:
        item["images"] = names
        item["generations"][1]["keep"] = 8
        if len(names) == 1:  # the second turn shows no picture of its own
            item["generations"][1] |= {"images": [], "keep_images": 1}
    if slot == 2:  # the second turn forgets the first, and its picture
        item["generations"][1] |= {"keep": 0, "keep_images": 0, "images": names[1:]}
    if (group_index, slot) == (1, 1):
        item |= {"remove_sample": True, "generations": [], "messages": [], "reward": None, "outcome": "failed"}
    return item


def rows(model_path: Path) -> list[Any]:
    """Returns the Samples of two groups of four trajectories."""
    shots: dict[str, bytes] = {}
    items = [delivered(f"task-{group}", group, slot, shots) for group in range(2) for slot in range(4)]
    args = Namespace(hf_checkpoint=str(model_path), rollout_batch_size=2, n_samples_per_prompt=4, global_batch_size=8)
    vision = load_vision(str(model_path))
    groups = SampleConverter(args, samples_per_group=4).groups(
        [decode_item(item) for item in items], vision, FetchedImages(data=shots)
    )
    return [row for trajectory in trajectories_of(finish_batch(groups, 0, args)) for row in trajectory]


def log_probs(model: Any, row: Any) -> list[float]:
    """Returns what HuggingFace's model says of the tokens of a row's response."""
    tokens = torch.tensor([row.tokens])
    images = row.multimodal_train_inputs or {}
    with torch.no_grad():
        logits = model(input_ids=tokens, mm_token_type_ids=(tokens == PAD).int(), **images).logits
    chosen = logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    values: list[float] = chosen[-row.response_length :].tolist()
    return values


def said_of(model: Any, row: Any) -> dict[str, Any]:
    """Returns a row's tokens, its log-probs and the grids of its pictures."""
    grids = (row.multimodal_train_inputs or {}).get("image_grid_thw")
    return {
        "tokens": row.tokens,
        "log_probs": log_probs(model, row),
        "image_grid_thw": [] if grids is None else grids.tolist(),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    model = make_model(folder / "model")
    samples = rows(folder / "model")
    torch.save([{field.name: getattr(row, field.name) for field in fields(row)} for row in samples], folder / "rows.pt")
    (folder / "log_probs.json").write_text(json.dumps([said_of(model, row) for row in samples]))
    summary = [(len(row.tokens), sum(row.loss_mask), row.remove_sample) for row in samples]
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
