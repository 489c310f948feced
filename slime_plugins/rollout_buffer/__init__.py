"""A durable rollout buffer for training agents: what programs of your own import, and where the rest is.

Names of ``__all__`` are imported when they are asked for: ``import slime_plugins.rollout_buffer`` alone loads nothing.

==================  ===============================================================================================
talk to a buffer    ``RolloutBufferClient``, ``AsyncRolloutBufferClient``; what they return is in ``wire/``
train on it         ``RolloutFeed`` and the records of ``trainer/``; slime's binding: ``slime.rollout.agent_rollout``
play on it          ``Generator``, its templates ``SingleTurnGenerator`` and ``MultiTurnGenerator``, ``ChatTokens``, and
                    an ``Engine`` of ``engine/``; ``testing/`` has what their tests want
words               the records and enums of ``types``, the error tree of ``errors``
==================  ===============================================================================================

Everything else is the buffer itself and may change without notice: ``cli/`` (every command), ``supervisor/``,
``runner/``, ``server/`` with ``openapi/``, ``buffer`` with ``state/``, ``storage/`` and ``rules/``,
``reporting/``, ``gateway/``, ``remote_rollout/``, ``evaluation/``, ``devices/``. docs/architecture.md says what each
holds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
    from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient, RolloutBufferClient
    from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
    from slime_plugins.rollout_buffer.errors import RolloutBufferError
    from slime_plugins.rollout_buffer.generator.base_generator import (
        Chat,
        Generator,
        GeneratorContext,
        MultiTurnGenerator,
        Score,
        SingleTurnGenerator,
    )
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
    from slime_plugins.rollout_buffer.types import (
        EpisodeRequest,
        Generation,
        Image,
        Instance,
        Outcome,
        SamplingParams,
        StopReason,
        TrainingRow,
        Trajectory,
        WeightVersionSpan,
    )
    from slime_plugins.rollout_buffer.wire import RolloutData, RolloutItem, StartReply

__all__ = [
    "AsyncRolloutBufferClient",
    "Chat",
    "ChatTokens",
    "Engine",
    "EpisodeRequest",
    "GenerateReply",
    "GenerateRequest",
    "Generation",
    "Generator",
    "GeneratorContext",
    "Image",
    "ImageSettings",
    "InputExhaustedError",
    "Instance",
    "JobEndedError",
    "JobStalledError",
    "MultiTurnGenerator",
    "Outcome",
    "RetriesUsedUpError",
    "RolloutBatch",
    "RolloutBufferClient",
    "RolloutBufferError",
    "RolloutData",
    "RolloutFeed",
    "RolloutGroup",
    "RolloutItem",
    "RolloutRow",
    "RolloutTrajectory",
    "RowSettings",
    "SamplingParams",
    "Score",
    "SingleTurnGenerator",
    "StartReply",
    "StopReason",
    "TrainingRow",
    "Trajectory",
    "WeightVersionSpan",
]

_HOMES = {
    "chat_tokens": ("ChatTokens",),
    "client": ("AsyncRolloutBufferClient", "RolloutBufferClient"),
    "engine.base": ("Engine", "GenerateReply", "GenerateRequest"),
    "errors": ("RolloutBufferError",),
    "generator.base_generator": (
        *("Chat", "Generator", "GeneratorContext", "MultiTurnGenerator", "Score", "SingleTurnGenerator"),
    ),
    "trainer.job_feed": ("InputExhaustedError", "JobEndedError", "JobStalledError", "RetriesUsedUpError"),
    "trainer.batch_types": ("RolloutBatch", "RolloutGroup", "RolloutRow", "RolloutTrajectory"),
    "trainer.rollout_feed": ("RolloutFeed",),
    "trainer.settings": ("ImageSettings", "RowSettings"),
    "types": (
        *("EpisodeRequest", "Generation", "Image", "Instance", "Outcome", "SamplingParams", "StopReason"),
        *("TrainingRow", "Trajectory", "WeightVersionSpan"),
    ),
    "wire": ("RolloutData", "RolloutItem", "StartReply"),
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _HOMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
