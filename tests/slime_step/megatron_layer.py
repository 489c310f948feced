"""Megatron's own layer without Transformer Engine, with attention for packed sequences on the CPU.

``--spec megatron_layer layer_spec`` of slime's training code; norms of a HuggingFace checkpoint find their places.
"""

from __future__ import annotations

import itertools
import re
from importlib import import_module
from pathlib import Path
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
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    experts: Any = import_module("megatron.core.transformer.moe.moe_utils")
    experts.te_general_gemm = None  # it asks for that, and leaves it undefined where Transformer Engine is missing
    spec = specs.get_gpt_layer_local_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    spec.submodules.sharded_state_dict_keys_map = {}
    return spec


class UnitOffsetNorm(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
    """RMSNorm whose weight is what it differs from one by, as Qwen3.5's is."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, hidden: Any) -> Any:
        """Scales to a root mean square of about one."""
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def qwen3_5_vl_provider(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Returns slime's own provider of Qwen3.5 with vision, on layers for the CPU: ``--spec megatron_layer …``.

    All of them are of full attention: slime's linear attention has no CPU code.
    """
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    model: Any = import_module("slime_plugins.models.qwen3_5_vl")

    def layers_for_the_cpu(args: Any, config: Any, vp_stage: int | None) -> Any:
        block = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        block.layer_norm = UnitOffsetNorm
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = PackedAttention
            attention.q_layernorm = attention.k_layernorm = UnitOffsetNorm
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = UnitOffsetNorm
            layer.submodules.sharded_state_dict_keys_map = {}
        return block

    model.get_qwen3_5_spec = layers_for_the_cpu
    return model.get_qwen3_5_vl_model_provider(args, config, vp_stage)


NAMES = {
    "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
    "decoder.final_layernorm.weight": ["model.norm.weight"],
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "self_attention.linear_qkv.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
}
"""Megatron's parameters of a Qwen3, each with those of HuggingFace that it joins."""
LAYER = "decoder.layers."


def load_hf_weights() -> None:
    """Lets slime load a HuggingFace checkpoint into these layers, which are not fused.

    slime has a loader of its own from August 2026 on, and is told where the norms are. Before, only a bridge for GPUs
    knew how: its place is taken.
    """
    try:
        hf_to_megatron = import_module("slime.backends.megatron_utils.hf_to_megatron")
    except ImportError:
        checkpoint: Any = import_module("slime.backends.megatron_utils.checkpoint")
        checkpoint._load_checkpoint_hf = _load_as_a_bridge_would
        return
    for family in ("qwen3", "qwen3_moe", "qwen3_5"):
        hf_to_megatron._LOADERS[family] = _of_unfused_layer(hf_to_megatron._LOADERS[family])


def _of_unfused_layer(original: Any) -> Any:
    def tensor_of(name: str, reader: Any, config: Any) -> Any:
        for ours, theirs in (
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ):
            if name.endswith("." + ours):
                name = name.removesuffix(ours) + theirs
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.weight", r"\2.weight\1", name)
        return original(name, reader, config)

    return tensor_of


def _load_as_a_bridge_would(ddp_model: Any, optimizer: Any, args: Any, load_path: str) -> tuple[int, int]:
    weights = import_module("safetensors.torch").load_file(Path(load_path) / "model.safetensors")
    with torch.no_grad():
        for name, parameter in ddp_model[0].module.named_parameters():
            parameter.copy_(_joined(name.removeprefix("module."), weights, groups=args.num_query_groups))
    return 0, 0


def _joined(name: str, weights: dict[str, Any], *, groups: int) -> Any:
    """Returns a parameter; queries, keys and values stand together by group."""
    number, _, rest = name.removeprefix(LAYER).partition(".")
    prefix, own = (f"model.layers.{number}.", rest) if name.startswith(LAYER) else ("", name)
    if expert := re.match(r"mlp\.experts\.local_(experts\.\d+\.)", own):
        prefix, own = f"{prefix}mlp.{expert[1]}", f"mlp.{own.removeprefix(expert[0])}"
        parts = [weights[prefix + theirs.removeprefix("mlp.")] for theirs in NAMES[own]]
    else:
        parts = [weights[prefix + theirs] for theirs in NAMES[own]]
    if len(parts) < 3:
        return torch.cat(parts)
    return torch.cat([part.reshape(groups, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)


def no_correction(args: Any, *, pg_loss: Any, loss_masks: Any, **_: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Stands where slime corrects for the engine's log-probs: asks for the trainer's and corrects nothing."""
    return pg_loss, loss_masks, {}
