"""A policy with a vocabulary of 12 tokens, for tests of training. Needs torch."""

from __future__ import annotations

from typing import Any

VOCABULARY = 12


def policy(seed: int = 0) -> Any:
    """A random Qwen3."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)
