"""A durable rollout buffer for training agents: what programs of your own import, and where the rest is.

Names of ``__all__`` are imported when they are asked for: ``import slime_plugins.rollout_buffer`` alone loads nothing.

==================  ===============================================================================================
talk to a buffer    ``RolloutBufferClient``, ``AsyncRolloutBufferClient``; what they return is in ``wire/``
train on it         ``RolloutFeed`` and the records of ``trainer/``; slime's binding: ``slime.rollout.agent_rollout``
play on it          ``Generator``, its templates ``SingleTurnGenerator`` and ``MultiTurnGenerator``, ``ChatTokens``, and
                    an ``Engine`` of ``engine/``; ``testing/`` has what their tests need
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
    from slime_plugins.rollout_buffer.chat_tokens import ChatTokens as ChatTokens
    from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient as AsyncRolloutBufferClient
    from slime_plugins.rollout_buffer.client import RolloutBufferClient as RolloutBufferClient
    from slime_plugins.rollout_buffer.engine.base import Engine as Engine
    from slime_plugins.rollout_buffer.engine.base import GenerateReply as GenerateReply
    from slime_plugins.rollout_buffer.engine.base import GenerateRequest as GenerateRequest
    from slime_plugins.rollout_buffer.errors import RolloutBufferError as RolloutBufferError
    from slime_plugins.rollout_buffer.generator.base_generator import Chat as Chat
    from slime_plugins.rollout_buffer.generator.base_generator import Generator as Generator
    from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext as GeneratorContext
    from slime_plugins.rollout_buffer.generator.base_generator import MultiTurnGenerator as MultiTurnGenerator
    from slime_plugins.rollout_buffer.generator.base_generator import Score as Score
    from slime_plugins.rollout_buffer.generator.base_generator import SingleTurnGenerator as SingleTurnGenerator
    from slime_plugins.rollout_buffer.trainer.batch_types import RolloutBatch as RolloutBatch
    from slime_plugins.rollout_buffer.trainer.batch_types import RolloutGroup as RolloutGroup
    from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow as RolloutRow
    from slime_plugins.rollout_buffer.trainer.batch_types import RolloutTrajectory as RolloutTrajectory
    from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError as InputExhaustedError
    from slime_plugins.rollout_buffer.trainer.job_feed import JobEndedError as JobEndedError
    from slime_plugins.rollout_buffer.trainer.job_feed import JobStalledError as JobStalledError
    from slime_plugins.rollout_buffer.trainer.job_feed import RetriesUsedUpError as RetriesUsedUpError
    from slime_plugins.rollout_buffer.trainer.rollout_feed import RolloutFeed as RolloutFeed
    from slime_plugins.rollout_buffer.trainer.settings import ImageSettings as ImageSettings
    from slime_plugins.rollout_buffer.trainer.settings import RowSettings as RowSettings
    from slime_plugins.rollout_buffer.types import EpisodeRequest as EpisodeRequest
    from slime_plugins.rollout_buffer.types import Generation as Generation
    from slime_plugins.rollout_buffer.types import Image as Image
    from slime_plugins.rollout_buffer.types import Instance as Instance
    from slime_plugins.rollout_buffer.types import Outcome as Outcome
    from slime_plugins.rollout_buffer.types import SamplingParams as SamplingParams
    from slime_plugins.rollout_buffer.types import StopReason as StopReason
    from slime_plugins.rollout_buffer.types import TrainingRow as TrainingRow
    from slime_plugins.rollout_buffer.types import Trajectory as Trajectory
    from slime_plugins.rollout_buffer.types import WeightVersionSpan as WeightVersionSpan
    from slime_plugins.rollout_buffer.wire import RolloutData as RolloutData
    from slime_plugins.rollout_buffer.wire import RolloutItem as RolloutItem
    from slime_plugins.rollout_buffer.wire import StartReply as StartReply

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
"""The module of each public name."""

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _HOMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
