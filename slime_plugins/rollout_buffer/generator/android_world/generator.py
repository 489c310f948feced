"""The Android World generator: settings, tokens and devices put together, one episode per ``play``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.errors import DeviceError, GeneratorError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.episode import Episode, read_task
from slime_plugins.rollout_buffer.generator.android_world.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.generator.android_world.prompting.prompts import first_turn_message, system_message
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.types import EpisodeRequest, Trajectory

__all__ = ["AndroidWorldGenerator"]

logger = logging.getLogger(__name__)


class AndroidWorldGenerator:
    """Plays Android World tasks on pooled devices. Give it a ``pool`` to play on devices of your own."""

    def __init__(self, pool: DevicePool | None = None) -> None:
        self._pool = pool
        self._parts: tuple[GeneratorContext, AndroidWorldSettings, ChatTokens] | None = None

    async def start(self, context: GeneratorContext) -> None:
        """Reads the settings, tries the chat template and connects to the devices.

        Raises:
            ConfigError: a setting is wrong, or tokenizer and template do not fit a model with eyes.
            DeviceError: no device came up.
        """
        settings = load_settings(context.options)
        chat = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))
        chat.prompt([system_message(), first_turn_message("try the template", "0" * 64)])
        if self._pool is None:
            farm = settings.for_devices()
            self._pool = create_device_pool(farm, job_id=context.job_id, ray_address=context.ray_address)
        await self._pool.start()
        self._parts = (context, settings, chat)
        logger.info("android_world is ready with %s", settings.model_dump_json(exclude_defaults=True))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode on the next free device; the device goes back however the episode ends.

        Raises:
            EpisodeError: the device, the engine or the task's set-up broke.
        """
        if self._pool is None or self._parts is None:
            raise GeneratorError("the android_world generator was not started")
        context, settings, chat = self._parts
        task = read_task(episode.instance)
        timer = PhaseTimer()
        with timer.phase("acquire"):
            lease = await self._pool.acquire(Purpose.EVALUATION if episode.evaluation else Purpose.TRAINING)
        async with lease as device:
            return await Episode(
                request=episode,
                task=task,
                device=device,
                engine=context.engine,
                chat=chat,
                settings=settings,
                timer=timer,
            ).play()

    async def devices(self) -> Mapping[str, Any]:
        """Returns the state of the device farm, as ``DevicePool.snapshot``.

        Raises:
            DeviceError: the farm does not answer, or is not connected yet.
        """
        if self._pool is None:
            raise DeviceError("the device pool is not there yet")
        return await self._pool.snapshot()

    async def close(self) -> None:
        """Gives the devices back; they stay up for the next job."""
        if self._pool is not None:
            await self._pool.close()
