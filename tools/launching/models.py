"""What can be trained: the kinds of run, the models that go with them, and their shapes in slime's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

TEXT_COMMIT, VISION_COMMIT = "624b824a8", "df926b6a9"
"""The slimes that are tried here: for text and Qwen3.5, and the newest that takes Qwen3-VL and Qwen2.5-VL."""


class LaunchError(Exception):
    """The run cannot be composed or started. The message says why and what to do."""


class Kind(StrEnum):
    """What is trained, and how its rollouts are made."""

    MATH = "math"
    """Single-turn mathematics through the buffer: the shortest way to see everything work."""
    ANDROID_WORLD = "android_world"
    """Android World, each episode one growing conversation."""
    ANDROID_WORLD_OPT = "android_world_opt"
    """The same on several nodes with large GPUs."""
    ANDROID_WORLD_HISTORY = "android_world_history"
    """Android World, each turn a prompt and a training row of its own."""

    @property
    def is_android(self) -> bool:
        """Whether devices are needed."""
        return self is not Kind.MATH


@dataclass(frozen=True, kw_only=True, slots=True)
class MathModel:
    """A model for mathematics: slime's script with its shape, its mask, and its rotary base where the script errs."""

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
"""The models that ``run_agent.sh`` knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionModel:
    """A model that sees: slime's script with the shape of its language model, its mask, and what its launch needs.

    ``native`` ones slime builds itself, with their own vision tower; the others go through a bridge, or FSDP.
    ``query_groups`` bound the tensor ranks; ``engine_gpus`` are what one engine takes.
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
"""The models that the scripts for Android World know."""


def default_model(kind: Kind) -> str:
    """Returns the model of a run that names none."""
    return "Qwen3-VL-2B-Instruct" if kind.is_android else "DeepSeek-R1-Distill-Qwen-7B"


def owner_of(model: str) -> str:
    """Returns whose model it is on the model hub."""
    return "deepseek-ai" if model.startswith("DeepSeek") else "Qwen"


def math_model(model: str) -> MathModel:
    """Returns what is known of a model for mathematics.

    Raises:
        LaunchError: nothing is.
    """
    found = MATH_MODELS.get(model)
    if found is None:
        raise LaunchError(f"the shape of {model!r} is not known here: {', '.join(MATH_MODELS)} are")
    return found


def vision_model(model: str) -> VisionModel:
    """Returns what is known of a model that sees.

    Raises:
        LaunchError: nothing is.
    """
    found = VISION_MODELS.get(model)
    if found is None:
        raise LaunchError(f"the shape of {model!r} is not known here: {', '.join(VISION_MODELS)} are")
    return found


def shape_of(kind: Kind, model: str) -> str:
    """Returns the name of slime's script with the shape of the model; of one that sees, of its language model.

    Raises:
        LaunchError: the model is not known.
    """
    return vision_model(model).shape if kind.is_android else math_model(model).shape
