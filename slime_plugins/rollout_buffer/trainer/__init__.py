"""A trainer's end of a job, for trainers of any framework: rows in, acknowledgements out.

``RolloutFeed`` is the whole of it. Below it: ``job_feed`` (polls, leases, retries), ``rows`` (items become rows),
``vision`` and ``image_fetch`` (screenshots), ``token_records`` (experts, kept ids), ``masks`` (loss masks of one's
own), ``consumed`` (what a checkpoint keeps), ``metrics`` and ``tracking``, ``evaluation``. slime's binding is
``slime/rollout/agent_rollout*.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.trainer.job_feed import (
        InputExhaustedError,
        JobEndedError,
        JobStalledError,
        RetriesUsedUpError,
    )
    from slime_plugins.rollout_buffer.trainer.records import (
        RolloutBatch,
        RolloutGroup,
        RolloutRow,
        RolloutTrajectory,
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
    "RolloutBatch": "records",
    "RolloutFeed": "rollout_feed",
    "RolloutGroup": "records",
    "RolloutRow": "records",
    "RolloutTrajectory": "records",
    "RowSettings": "settings",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: naming the package loads nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
