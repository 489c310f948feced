"""What can be trained: the kinds of run, the models that go with them, and their shapes in slime's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["MATH_MODELS", "Kind", "LaunchError", "MathModel", "default_model", "math_model", "owner_of", "shape_of"]

SIZES = {"2B": "qwen3-1.7B", "4B": "qwen3-4B", "8B": "qwen3-8B"}
"""Qwen3-VL's language model by size, as slime's ``scripts/models`` names its shape."""


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


def shape_of(kind: Kind, model: str) -> str:
    """Returns the name of slime's script with the shape of the model; of one that sees, of its language model.

    Raises:
        LaunchError: the model is not known.
    """
    if not kind.is_android:
        return math_model(model).shape
    found = re.fullmatch(r"Qwen3-VL-(2B|4B|8B)-(Instruct|Thinking)", model)
    if found is None:
        raise LaunchError(f"the shape of {model!r} is not known here: Qwen3-VL-{{2B,4B,8B}}-{{Instruct,Thinking}} are")
    return SIZES[found.group(1)]
