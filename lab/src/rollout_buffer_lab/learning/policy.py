"""A tiny policy of Qwen3's architecture: random weights, which imitation of scripted episodes warms up.

A policy that takes images has Qwen3-VL's architecture, with an image processor for small screens.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.utils.logging import disable_progress_bar

from rollout_buffer_lab.learning.batches import batch_of, trained_logits
from rollout_buffer_lab.learning.losses import token_log_probs, token_weights
from rollout_buffer_lab.learning.task_file import WarmUpPlan
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutTrajectory

POSITIONS_OF_PATCHES = 256
"""Learned positions of a picture's patches: a grid of 16 by 16, stretched over any picture."""
WEIGHT_STD, POSITION_STD = 0.1, 0.7
"""Standard deviations of a vision policy's random weights, and of its patches' learned positions.

The published 0.02 is for wide models: with it, a policy as narrow as this still ignored its picture after 200 updates,
and with 0.1 for both after 400. With these values it uses the picture after about 250.
"""
VISION_TOKENS = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 1_048_576},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Qwen3-VL's published settings, except that the smallest picture has 32 by 32 pixels."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySize:
    """Width and depth; 64 wide over the demo tokenizer's 4,096 ids are 0.35 million parameters."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 4096


def new_policy(tokenizer: Any, size: PolicySize, seed: int, *, patch_size: int | None = None) -> Any:
    """Returns a policy with random weights. With ``patch_size`` (side of a patch in pixels) it takes images."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": max(1, size.heads // 2),
        "head_dim": size.hidden // size.heads,
        "max_position_embeddings": size.context,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if patch_size is None:
        return Qwen3ForCausalLM(Qwen3Config(**text, tie_word_embeddings=True))
    half = size.hidden // size.heads // 2  # M-RoPE splits it into time, height and width
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_interleaved": True,
        "mrope_section": [half - 2 * (half // 4), half // 4, half // 4],
    }
    vision = {
        "depth": 2,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_heads": size.heads,
        "out_hidden_size": size.hidden,
        "patch_size": patch_size,
        "num_position_embeddings": POSITIONS_OF_PATCHES,
        "deepstack_visual_indexes": [0],
        "initializer_range": WEIGHT_STD,
    }
    text["initializer_range"] = WEIGHT_STD
    named = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
    policy = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **named)
    )
    torch.nn.init.normal_(policy.model.visual.pos_embed.weight, std=POSITION_STD)
    return policy


def load_policy(folder: Path) -> tuple[Any, Any]:
    """Returns the model, in float32, and the tokenizer of a folder in Hugging Face layout."""
    disable_progress_bar()
    takes_images = hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config")
    model_class = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    model = model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def save_policy(policy: Any, folder: Path) -> None:
    """Writes the weights for an engine to load."""
    disable_progress_bar()
    policy.save_pretrained(folder)


def save_processors(tokenizer: Any, folder: Path, *, patch_size: int | None = None, model: Path | None = None) -> None:
    """Writes a policy's tokenizer, and for a vision policy its image processor.

    The image processor is a new one for ``patch_size``, or a copy of that in the folder ``model``.
    """
    tokenizer.save_pretrained(folder)
    if patch_size is not None:
        settings = {**IMAGE_PROCESSOR, "patch_size": patch_size}
        (folder / PROCESSOR_FILES[0]).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    if model is not None:
        for path in [model / name for name in PROCESSOR_FILES if (model / name).is_file()]:
            shutil.copy(path, folder)


def imitate(policy: Any, trajectories: Sequence[RolloutTrajectory], plan: WarmUpPlan, *, seed: int = 0) -> float:
    """Trains the policy on the trajectories' replies (supervised); returns the mean loss of the last 20 updates in nats
    a token."""
    rng = random.Random(seed)
    losses: list[float] = []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98))
    first_factor = 1.0 / (plan.rising + 1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, first_factor, total_iters=plan.rising)
    for _ in range(plan.updates):
        batch = batch_of(rng.sample(trajectories, min(plan.batch, len(trajectories))), policy.device.type)
        log_probs = token_log_probs(trained_logits(policy, batch), batch.targets)
        loss = -(log_probs * token_weights(batch.trajectories)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return fmean(losses[-20:]) if losses else math.nan
