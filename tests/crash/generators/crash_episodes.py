"""A generator for the crash test: short episodes without an engine, some of which die of their device.

What an episode meets is a function of its name: ``-short`` loses one slot of four, ``-dead`` every slot, ``-same``
earns one reward in all of them, and of the others about every eighth attempt dies and is tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random

from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Outcome, StopReason, Trajectory

TASK_TYPE = "crash_episodes"
REWARD_RANGE = (0.0, 1.0)


class CrashEpisodes:
    """Plays an episode in a few milliseconds."""

    async def start(self, context: GeneratorContext) -> None:
        """Needs nothing."""

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Returns a trajectory, or raises what its name asks for."""
        rng = random.Random(int(hashlib.sha256(episode.uid.encode()).hexdigest()[:16], 16))
        await asyncio.sleep(rng.uniform(0.0, 0.08))
        name, slot = episode.instance.instance_id, episode.slot
        if name.endswith("-dead") or (name.endswith("-short") and slot == 3) or rng.random() < 0.12:
            raise DeviceError(f"the device of {episode.uid} is gone")
        return _trajectory(episode, rng)

    async def close(self) -> None:
        """Has nothing to give back."""


def _trajectory(episode: EpisodeRequest, rng: random.Random) -> Trajectory:
    text = {"type": "text", "text": rng.randbytes(rng.choice((200, 3_000, 40_000))).hex()}
    same = episode.instance.instance_id.endswith("-same")
    return Trajectory(
        uid=episode.uid,
        instance_id=episode.instance.instance_id,
        messages=[{"role": "user", "content": [text]}, {"role": "assistant", "content": episode.uid}],
        reward=1.0 if same else float(episode.slot % 2),
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.STOP,
        generations=[Generation(prompt_ids=[1, 2, 3], output_ids=[4, 5], output_log_probs=[-0.1, -0.2])],
    )


def create_generator() -> CrashEpisodes:
    """Returns a generator that is not started yet."""
    return CrashEpisodes()
