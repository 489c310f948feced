"""A tiny policy: Qwen3's architecture over a tokenizer's ids, random at first, then warmed up on scripted episodes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from slime_plugins.rollout_buffer.learning.batches import batch_of, trained_logits
from slime_plugins.rollout_buffer.learning.losses import token_log_probs, token_weights
from slime_plugins.rollout_buffer.trainer.records import RolloutTrajectory

__all__ = ["PolicySize", "imitate", "load_policy", "new_policy", "save_policy"]

BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySize:
    """Width and depth; 64 wide over the demo tokenizer's 4,096 ids are 0.35 million parameters."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 4096


def new_policy(tokenizer: Any, size: PolicySize, seed: int) -> Any:
    """A policy with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 2),
        head_dim=size.hidden // size.heads,
        max_position_embeddings=size.context,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def load_policy(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer in a folder in Hugging Face layout, in float32."""
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def save_policy(policy: Any, folder: Path, tokenizer: Any = None) -> None:
    """Writes the weights, and the tokenizer if it is given, for an engine to load."""
    disable_progress_bar()
    policy.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def imitate(
    policy: Any, trajectories: Sequence[RolloutTrajectory], *, updates: int, learning_rate: float = 2e-3, seed: int = 0
) -> float:
    """Trains the policy to say what was said in the trajectories, and returns the last updates' mean loss in nats."""
    rng = random.Random(seed)
    losses: list[float] = []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    for _ in range(updates):
        batch = batch_of(rng.sample(trajectories, min(BATCH, len(trajectories))), policy.device.type)
        log_probs = token_log_probs(trained_logits(policy, batch), batch.targets)
        loss = -(log_probs * token_weights(batch.trajectories)).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-20:]) if losses else math.nan
