"""What can be trained: kinds of runs, models with the names of their shapes in slime, and features of a slime checkout.

A checkout's files are read, never imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

TEXT_COMMIT, VISION_COMMIT = "624b824a8", "df926b6a9"
"""The tested commits of slime: for text and Qwen3.5, and the newest, for Qwen3-VL and Qwen2.5-VL."""


class LaunchError(Exception):
    """The run cannot be composed or started; the message has the reason and the remedy."""


class Kind(StrEnum):
    """Kind of a training run."""

    MATH = "math"
    """Single-turn mathematics through the buffer: the smallest complete run."""
    ANDROID_WORLD = "android_world"
    """Android World, each episode one growing conversation."""
    ANDROID_WORLD_OPT = "android_world_opt"
    """The same on several nodes with large GPUs."""
    ANDROID_WORLD_HISTORY = "android_world_history"
    """Android World, with a prompt and a training row per turn."""

    @property
    def is_android(self) -> bool:
        """True if the run needs devices."""
        return self is not Kind.MATH


@dataclass(frozen=True, kw_only=True, slots=True)
class MathModel:
    """A model for mathematics: slime's script of its shape, its mask type, and its rotary base if slime's is wrong."""

    shape: str
    loss_mask_type: str
    rotary_base: int | None = None


MATH_MODELS: Mapping[str, MathModel] = {
    # Made from Qwen2.5-Math, whose rotary base is not that of Qwen2.5: slime compares it with the model's own config.
    "DeepSeek-R1-Distill-Qwen-7B": MathModel(shape="qwen2.5-7B", loss_mask_type="distill_qwen", rotary_base=10_000),
    "Qwen2.5-7B-Instruct": MathModel(shape="qwen2.5-7B", loss_mask_type="qwen"),
    "Qwen3-4B": MathModel(shape="qwen3-4B", loss_mask_type="qwen3"),
    "Qwen3-8B": MathModel(shape="qwen3-8B", loss_mask_type="qwen3"),
}
"""The models of ``run_agent.sh``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionModel:
    """A vision model: slime's script of its language model's shape, its mask type, and launch options.

    slime itself implements ``native`` ones with their vision tower; the others use a bridge, or FSDP. ``query_groups``
    limits the tensor ranks; ``engine_gpus`` is the number of GPUs per engine.
    """

    shape: str
    loss_mask_type: str
    query_groups: int
    rotary_base: int | None = None
    native: bool = False
    experts: bool = False
    engine_gpus: int = 1


def _qwen3_vl(shape: str) -> VisionModel:
    return VisionModel(shape=shape, loss_mask_type="qwen3", query_groups=8, rotary_base=5_000_000)


def _qwen3_5(size: str, query_groups: int, *, experts: bool = False, engine_gpus: int = 1) -> VisionModel:
    return VisionModel(
        shape=f"qwen3.5-{size}",
        loss_mask_type="qwen3_5",
        query_groups=query_groups,
        native=True,
        experts=experts,
        engine_gpus=engine_gpus,
    )


VISION_MODELS: Mapping[str, VisionModel] = {
    **{
        f"Qwen3-VL-{size}-{variant}": _qwen3_vl(shape)
        for size, shape in {"2B": "qwen3-1.7B", "4B": "qwen3-4B", "8B": "qwen3-8B"}.items()
        for variant in ("Instruct", "Thinking")
    },
    "Qwen2.5-VL-3B-Instruct": VisionModel(shape="qwen2.5-3B", loss_mask_type="qwen", query_groups=2),
    "Qwen2.5-VL-7B-Instruct": VisionModel(shape="qwen2.5-7B", loss_mask_type="qwen", query_groups=4),
    "Qwen3.5-0.8B": _qwen3_5("0.8B", 2),
    "Qwen3.5-4B": _qwen3_5("4B", 4),
    "Qwen3.5-9B": _qwen3_5("9B", 4),
    "Qwen3.5-27B": _qwen3_5("27B", 4, engine_gpus=2),
    "Qwen3.5-35B-A3B": _qwen3_5("35B-A3B", 2, experts=True, engine_gpus=4),
}
"""The models of the Android World scripts."""


def default_model(kind: Kind) -> str:
    """Returns the default model of a kind of run."""
    return "Qwen3-VL-2B-Instruct" if kind.is_android else "DeepSeek-R1-Distill-Qwen-7B"


def owner_of(model: str) -> str:
    """Returns the model's owner on the model hub."""
    return "deepseek-ai" if model.startswith("DeepSeek") else "Qwen"


def math_model(model: str) -> MathModel:
    """Returns the entry of a model for mathematics.

    Raises:
        LaunchError: the model is unknown.
    """
    entry = MATH_MODELS.get(model)
    if entry is None:
        raise LaunchError(f"the model {model!r} is not supported; supported are {', '.join(MATH_MODELS)}")
    return entry


def vision_model(model: str) -> VisionModel:
    """Returns the entry of a vision model.

    Raises:
        LaunchError: the model is unknown.
    """
    entry = VISION_MODELS.get(model)
    if entry is None:
        raise LaunchError(f"the model {model!r} is not supported; supported are {', '.join(VISION_MODELS)}")
    return entry


def shape_of(kind: Kind, model: str) -> str:
    """Returns the name of slime's script of the model's shape; for a vision model, of its language model.

    Raises:
        LaunchError: the model is unknown.
    """
    return vision_model(model).shape if kind.is_android else math_model(model).shape


def backends_of(slime: Path) -> tuple[str, ...]:
    """Returns the checkout's training backends: fsdp, if it has it, before megatron.

    Raises:
        LaunchError: it is no slime checkout.
    """
    choices = re.search(r'"--train-backend"[^)]*?choices=\[([^\]]*)\]', _arguments_of(slime))
    return tuple(sorted(re.findall(r"[\w-]+", choices.group(1)))) if choices is not None else ("megatron",)


def backend_of(slime: Path, requested: str | None) -> str:
    """Returns the requested backend, or the first of fsdp and megatron that this slime has.

    Raises:
        LaunchError: this slime has no such backend, or is no checkout.
    """
    if requested not in (None, "", "fsdp", "megatron"):
        raise LaunchError(f"SLIME_SCRIPT_TRAIN_BACKEND is {requested!r}: must be fsdp or megatron")
    backends = backends_of(slime)
    if requested and requested not in backends:
        raise LaunchError(f"this slime has no backend {requested}: it has {', '.join(backends)}")
    return requested or next(name for name in ("fsdp", "megatron") if name in backends)


def has_flag(slime: Path, flag: str) -> bool:
    """Returns True if slime's arguments define the flag."""
    return f'"{flag}"' in _arguments_of(slime)


def trains_qwen3_vl(slime: Path) -> bool:
    """Returns True if it can train Qwen3-VL and Qwen2.5-VL: with FSDP, or through a Megatron bridge."""
    return "fsdp" in backends_of(slime) or bridges(slime)


def bridges(slime: Path) -> bool:
    """Returns True if its Megatron backend has a bridge to models of the hub (Qwen2.5-VL and Qwen3-VL)."""
    return has_flag(slime, "--megatron-to-hf-mode")


def trains_qwen3_5_vl(slime: Path) -> bool:
    """Returns True if its Megatron backend implements Qwen3.5 with its vision tower."""
    return (slime / "slime_plugins" / "models" / "qwen3_5_vl.py").is_file()


def rows_share_weight(slime: Path) -> bool:
    """Returns True if rows of one trajectory can share its weight: its Sample has a field for the trajectory."""
    types = slime / "slime" / "utils" / "types.py"
    return re.search(r"^    (rollout_id|group_id)\b", types.read_text(encoding="utf-8"), re.MULTILINE) is not None


def takes_weight_off_dummies(slime: Path) -> bool:
    """Returns True if its ranks know the divisor of a trajectory's mean: dummies can be left out there."""
    loss = slime / "slime" / "backends" / "megatron_utils" / "loss.py"
    return loss.is_file() and '"rollout_mask_sums"' in loss.read_text(encoding="utf-8")


def loads_hf_weights(slime: Path) -> bool:
    """Returns True if its Megatron backend loads Hugging Face checkpoints without conversion."""
    return (slime / "slime" / "backends" / "megatron_utils" / "hf_to_megatron").is_dir()


def _arguments_of(slime: Path) -> str:
    file = slime / "slime" / "utils" / "arguments.py"
    if not file.is_file():
        raise LaunchError(f"{slime} is no slime checkout: name one in SLIME_DIR")
    return file.read_text(encoding="utf-8")
