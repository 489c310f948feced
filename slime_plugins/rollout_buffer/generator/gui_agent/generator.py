"""The base generator of agents on a screen: settings, tokenizer and devices.

A task type is a subclass that defines its settings, rewards and prompts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.errors import DeviceError, GeneratorError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.episode import Episode, read_task
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import PromptObservation, first_turn_message
from slime_plugins.rollout_buffer.generator.gui_agent.settings import GuiAgentSettings, ObservationMode
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import RewardRule
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import EpisodeRequest, Trajectory

logger = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=GuiAgentSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts(Generic[SettingsT]):
    context: GeneratorContext
    settings: SettingsT
    chat: ChatTokens


class GuiAgentGenerator(ABC, Generic[SettingsT]):
    """Plays tasks on pooled devices with screens. ``pool`` replaces the pool of the settings."""

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = ("tokenizer_path",)

    def __init__(self, pool: DevicePool | None = None) -> None:
        self._pool = pool
        self._parts: _Parts[SettingsT] | None = None

    @abstractmethod
    def settings_of(self, options: Mapping[str, Any]) -> SettingsT:
        """Returns the settings for a job with these options.

        Raises:
            ConfigError: a setting is invalid.
        """

    @abstractmethod
    def rewards_of(self, settings: SettingsT) -> RewardRule:
        """Returns the reward rule."""

    def view_of(self, settings: SettingsT) -> View:
        """Returns the tool description and the observation mode of prompts; by default a phone's screenshots."""
        del settings
        return View()

    async def start(self, context: GeneratorContext) -> None:
        """Reads the settings, tests the chat template and connects to the devices.

        Raises:
            ConfigError: a setting is invalid, or tokenizer and template do not support the observations.
            DeviceError: no device came up.
        """
        settings = self.settings_of(context.options)
        view = self.view_of(settings)
        chat = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))
        sample = (
            PromptObservation(elements="a line")
            if view.observation_mode is ObservationMode.ELEMENTS
            else PromptObservation(screenshot="0" * 64)
        )
        chat.prompt([view.system(), first_turn_message("try the template", sample)])
        if self._pool is None:
            farm = settings.for_devices()
            self._pool = create_device_pool(farm, job_id=context.job_id, ray_address=context.ray_address)
        await self._pool.start()
        self._parts = _Parts(context=context, settings=settings, chat=chat)
        logger.info("%s is ready with %s", type(self).__name__, settings.model_dump_json(exclude_defaults=True))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode on the next free device, and returns the device in any case.

        Raises:
            EpisodeError: the device, the engine or the task's set-up failed.
        """
        if self._pool is None or self._parts is None:
            raise GeneratorError(f"{type(self).__name__} was not started")
        parts = self._parts
        task = read_task(episode.instance)
        timer = PhaseTimer()
        with timer.phase("acquire"):
            lease = await self._pool.acquire(Purpose.EVALUATION if episode.evaluation else Purpose.TRAINING)
        async with lease as device:
            return await Episode(
                request=episode,
                task=task,
                device=device,
                engine=parts.context.engine,
                chat=parts.chat,
                settings=parts.settings,
                rewards=self.rewards_of(parts.settings),
                view=self.view_of(parts.settings),
                timer=timer,
            ).play()

    async def devices(self) -> Mapping[str, Any]:
        """Returns the state of the device pool, as ``DevicePool.snapshot``.

        Raises:
            DeviceError: the pool does not answer, or is not connected yet.
        """
        if self._pool is None:
            raise DeviceError("the device pool is not connected yet")
        return await self._pool.snapshot()

    async def close(self) -> None:
        """Returns the devices; they stay up for the next job."""
        if self._pool is not None:
            await self._pool.close()
