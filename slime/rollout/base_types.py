"""A stand-in for slime's own ``slime.rollout.base_types``, never installed over it: what a rollout function returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples; one level deeper when a trajectory became several. ``metrics`` reach the log verbatim."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per evaluation set its ``rewards``, ``truncated`` and ``samples``, three lists of one length."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None
