"""The client side of a job, for trainers of any framework: training rows in, acknowledgements out.

``RolloutFeed`` is the complete interface. Its parts: ``job_feed`` (polls, leases, retries), ``row_builder`` (items to
rows), ``vision`` and ``image_fetch`` (screenshots), ``row_token_records`` (routed experts, top-p ids),
``mask_selection`` (custom loss masks), ``consumed`` (checkpoint metadata), ``metrics``, ``tracking``, ``eval_job``.
slime's binding is ``slime/rollout/agent_rollout*.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.trainer.batch_types import (
        RolloutBatch,
        RolloutGroup,
        RolloutRow,
        RolloutTrajectory,
    )
    from slime_plugins.rollout_buffer.trainer.job_feed import (
        InputExhaustedError,
        JobEndedError,
        JobStalledError,
        RetriesUsedUpError,
    )
    from slime_plugins.rollout_buffer.trainer.rollout_feed import RolloutFeed
    from slime_plugins.rollout_buffer.trainer.settings import ImageSettings, RowSettings

__all__ = [
    "ImageSettings",
    "InputExhaustedError",
    "JobEndedError",
    "JobStalledError",
    "RetriesUsedUpError",
    "RolloutBatch",
    "RolloutFeed",
    "RolloutGroup",
    "RolloutRow",
    "RolloutTrajectory",
    "RowSettings",
]

_HOMES = {
    "ImageSettings": "settings",
    "InputExhaustedError": "job_feed",
    "JobEndedError": "job_feed",
    "JobStalledError": "job_feed",
    "RetriesUsedUpError": "job_feed",
    "RolloutBatch": "batch_types",
    "RolloutFeed": "rollout_feed",
    "RolloutGroup": "batch_types",
    "RolloutRow": "batch_types",
    "RolloutTrajectory": "batch_types",
    "RowSettings": "settings",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: naming the package loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
