"""One episode in a test: a generator is called, and its trajectory checked, as by the runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.engine.base import Engine
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.generator.result_check import checked_trajectory
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, SamplingParams, Trajectory


def episode_request(
    data: Mapping[str, Any],
    *,
    max_new_tokens: int = 512,
    options: Mapping[str, Any] | None = None,
    evaluation: bool = False,
    slot: int = 0,
) -> EpisodeRequest:
    """Returns the request that a generator gets for one line of its input.

    ``data`` is the line; without an ``instance_id`` of its own it gets ``test``. ``options`` are the job's
    settings for the generator.
    """
    instance_id = str(data.get("instance_id", "test"))
    return EpisodeRequest(
        uid=f"{instance_id}.{slot}",
        job_id="test",
        instance=Instance(instance_id=instance_id, data={"instance_id": instance_id, **data}),
        epoch=0,
        slot=slot,
        attempt=1,
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
        options=dict(options or {}),
        evaluation=evaluation,
    )


async def play_episode(
    generator: Generator, request: EpisodeRequest, engine: Engine, *, tokenizer: Any = None
) -> Trajectory:
    """Starts a generator, plays one episode of it, closes it, and returns the trajectory as the runner would store it.

    Raises:
        EpisodeError, GeneratorError: the runner would refuse the trajectory; see ``checked_trajectory``.
        Exception: as the generator raises it.
    """
    context = GeneratorContext(
        job_id=request.job_id, engine=engine, tokenizer=tokenizer, concurrency=1, options=request.options
    )
    await generator.start(context)
    try:
        trajectory = await generator.play(request)
    finally:
        await generator.close()
    return checked_trajectory(trajectory, request)
