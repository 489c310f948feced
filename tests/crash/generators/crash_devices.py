"""A generator for the crash test that needs a Ray cluster: an episode checks that the one it was given answers."""

from __future__ import annotations

import asyncio

from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Outcome, StopReason, Trajectory

TASK_TYPE = "crash_devices"
NEEDS_RAY = True
REWARD_RANGE = (0.0, 1.0)


class CrashDevices:
    """Connects to the cluster's address, and fails as a device does where nobody answers."""

    async def start(self, context: GeneratorContext) -> None:
        """Remembers the cluster."""
        assert context.ray_address is not None
        self._host, _, port = context.ray_address.partition(":")
        self._port = int(port)

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Returns a trajectory, where the cluster answers."""
        await asyncio.sleep(0.3)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(self._host, self._port), 5)
        except OSError as error:
            raise DeviceError(f"the cluster at {self._host}:{self._port} is gone: {error}") from error
        writer.close()
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=[{"role": "user", "content": "look"}, {"role": "assistant", "content": episode.uid}],
            reward=float(episode.slot % 2),
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.STOP,
            generations=[Generation(prompt_ids=[1, 2, 3], output_ids=[4, 5], output_log_probs=[-0.1, -0.2])],
        )

    async def close(self) -> None:
        """Has nothing to give back."""


def create_generator() -> CrashDevices:
    """Returns a generator that is not started yet."""
    return CrashDevices()
