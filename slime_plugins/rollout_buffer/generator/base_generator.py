"""What a generator is: something that plays one episode per call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from slime_plugins.rollout_buffer.engine import Engine
from slime_plugins.rollout_buffer.types import EpisodeRequest, Trajectory

__all__ = ["Generator", "GeneratorContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorContext:
    """What the runner hands to a generator once, before the first episode.

    ``tokenizer`` is the trainer's own, loaded from the job's ``tokenizer_path``; None when the job named none.
    ``concurrency`` is the largest number of episodes that will be played at once. ``ray_address`` says which Ray
    cluster holds the devices; None when the generator asked for no devices. ``options`` are the payload's keys that
    the job itself does not use.
    """

    job_id: str
    engine: Engine
    tokenizer: Any
    concurrency: int
    ray_address: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Generator(Protocol):
    """Plays episodes of one task type. A module in ``generator/`` that defines ``TASK_TYPE`` offers one through
    ``create_generator() -> Generator``; it may also define any of the five group functions, and ``REWARD_RANGE``,
    ``NEEDS_RAY``. ``play`` is called many times at once on one event loop and must never block it.
    """

    async def start(self, context: GeneratorContext) -> None:
        """Gets ready: connects to devices, compiles prompts. Called once, before the first ``play``."""
        ...

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode to its end and returns its record, under ``episode.uid``.

        Raises:
            EpisodeError: the attempt died of its device, engine or environment. It earns no reward and is retried.
        """
        ...

    async def close(self) -> None:
        """Gives everything back. Called once, also after a failed ``start``."""
        ...
