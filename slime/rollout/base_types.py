"""Replacement for ``slime.rollout.base_types`` where slime is not installed: the results of a rollout function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples. If a trajectory has several rows, each member of a group is the list of its samples.

    slime logs ``metrics`` verbatim.
    """

    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """``data`` has ``rewards``, ``truncated`` and ``samples`` of each evaluation set: three lists of equal length."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None
