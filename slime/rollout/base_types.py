"""Replacement for ``slime.rollout.base_types`` where slime is not installed: the results of a rollout function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples, nested one level deeper if a trajectory has several rows. slime logs ``metrics`` verbatim."""

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """By evaluation set: ``rewards``, ``truncated`` and ``samples``, three lists of equal length."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None
