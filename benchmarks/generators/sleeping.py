"""Plays the sleeping episodes of the comparison with slime's own asynchronous rollout: no engine, no devices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sleeping_episodes import SleepingEpisode
from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Generation, Outcome, StopReason, Trajectory

TASK_TYPE = "sleeping"
OPTION_KEYS = frozenset({"sleeping"})
PROMPT_IDS = (1, 2, 3)


def is_valid_group(group: Any, min_valid_group_size_ratio: float, task_type: str) -> bool:
    """Accepts every group, as slime does: equal rewards are trained too."""
    return True


class SleepingGenerator:
    """Sleeps as long as the episode lasts; then it fails, or its reply has tokens in proportion."""

    async def start(self, context: GeneratorContext) -> None:
        """Reads ``sleeping`` of the payload: the seed, sigma, and the file that holds the trainer's weight version."""
        self._options: Mapping[str, Any] = context.options["sleeping"]

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode.

        Raises:
            EnvironmentSetupError: the episode is one that fails.
        """
        version = self._weight_version()
        instance = int(episode.instance.instance_id)
        sleep = SleepingEpisode.of(self._options["seed"], self._options["sigma"], instance, episode.slot)
        await asyncio.sleep(sleep.seconds)
        if sleep.fails:
            raise EnvironmentSetupError(f"member {episode.slot} of instance {instance} always fails")
        output_ids = (7,) * sleep.tokens
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=({"role": "user", "content": "sleep"}, {"role": "assistant", "content": "slept"}),
            reward=sleep.reward,
            outcome=Outcome.COMPLETED,
            stop_reason=StopReason.STOP,
            generations=(
                Generation(
                    prompt_ids=PROMPT_IDS,
                    output_ids=output_ids,
                    output_log_probs=(-0.5,) * sleep.tokens,
                    weight_version=version,
                ),
            ),
            extra_info={"member": episode.slot, "version": int(version)},
            timings_s={"generate": sleep.seconds},
        )

    def _weight_version(self) -> str:
        return Path(self._options["version_file"]).read_text(encoding="utf-8")

    async def close(self) -> None:
        """Does nothing."""


def create_generator() -> SleepingGenerator:
    """Returns a generator that is not started yet."""
    return SleepingGenerator()
