"""From messages or generations to training rows. Pure: imports nothing of this project; the tokenizer is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Generation", "TrainingRow", "WeightVersionSpan"]


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Output tokens ``start`` to ``end`` (exclusive) of one generation were sampled by ``weight_version``."""

    weight_version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What the engine sampled in one turn, exactly as it went in and came out.

    ``prompt_ids`` hold one placeholder per image, as the engine received them. ``output_log_probs`` is None when the
    engine gave none, otherwise as long as ``output_ids``. A turn that was aborted and resumed is one generation with
    several ``weight_version_spans``. ``trained=False`` keeps the tokens as context only.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    output_log_probs: Sequence[float] | None = None
    finish_reason: str = "stop"
    weight_version: str | None = None
    trained: bool = True
    weight_version_spans: tuple[WeightVersionSpan, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.output_log_probs is not None and len(self.output_log_probs) != len(self.output_ids):
            raise ValueError(
                f"a generation has {len(self.output_ids)} output ids but {len(self.output_log_probs)} log-probs"
            )


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence the trainer computes a loss on; the three lists have one length."""

    token_ids: list[int]
    loss_mask: list[int]
    log_probs: list[float] | None
    response_length: int
    generation_indices: tuple[int, ...]
