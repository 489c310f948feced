"""Megatron's own layer without Transformer Engine, with attention for packed sequences on the CPU.

``--spec megatron_layer layer_spec`` of slime's training code; norms of a HuggingFace checkpoint find their places.
"""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import torch

MegatronModule: Any = import_module("megatron.core.transformer.module").MegatronModule


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Causal attention within each packed sequence."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.groups = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Returns [tokens, heads * width] for queries of [tokens, heads, width]."""
        key, value = (tensor.repeat_interleave(self.groups, dim=-2) for tensor in (key, value))
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, end in itertools.pairwise(bounds):
            q, k, v = (tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(attended.squeeze(0).transpose(0, 1).reshape(end - start, -1))
        return torch.cat(parts)


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Returns the spec of one layer."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    spec.submodules.sharded_state_dict_keys_map = {}
    return spec


def map_norms() -> None:
    """Tells slime's loader of HuggingFace weights where the norms are in a layer that is not fused."""
    hf_to_megatron = import_module("slime.backends.megatron_utils.hf_to_megatron")

    def of_local_layer(name: str, reader: Any, config: Any) -> Any:
        for ours, theirs in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ):
            if name.endswith("." + ours):
                name = name.removesuffix(ours) + theirs
        return original(name, reader, config)

    original = hf_to_megatron._LOADERS["qwen3"]
    hf_to_megatron._LOADERS["qwen3"] = of_local_layer


def no_correction(args: Any, *, pg_loss: Any, loss_masks: Any, **_: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Stands where slime corrects for the engine's log-probs: asks for the trainer's and corrects nothing."""
    return pg_loss, loss_masks, {}
