"""The base generator of agents on a screen: settings, tokenizer and devices.

A task type is a subclass that defines its settings, rewards and prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.capabilities import REFUSED
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError, GeneratorError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.episode import Episode, read_task
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import PromptObservation, first_turn_message
from slime_plugins.rollout_buffer.generator.gui_agent.settings import GuiAgentSettings, ObservationMode
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import RewardRule
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, Trajectory

logger = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=GuiAgentSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts(Generic[SettingsT]):
    """What ``start`` has prepared for all episodes."""

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

    def needs_of(self, task_name: str) -> frozenset[str]:
        """Returns the capabilities that a device must have for the task; by default none."""
        del task_name
        return frozenset()

    async def start(self, context: GeneratorContext) -> None:
        """Reads the settings, tests the chat template and connects to the devices.

        Raises:
            ConfigError: a setting is invalid, tokenizer and template do not support the observations, or no device can
                play a task of the job.
            DeviceError: no device came up.
        """
        settings = self.settings_of(context.options)
        view = self.view_of(settings)
        chat = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))
        probe = (
            PromptObservation(elements="a line")
            if view.observation_mode is ObservationMode.ELEMENTS
            else PromptObservation(screenshot="0" * 64)
        )
        chat.prompt([view.system(), first_turn_message("try the template", probe)])
        if self._pool is None:
            pool_settings = settings.for_devices()
            self._pool = create_device_pool(pool_settings, job_id=context.job_id, ray_address=context.ray_address)
        await self._pool.start()
        await self._pool.check_playable(await asyncio.to_thread(self._needs_by_task, context.read_instances))
        self._parts = _Parts(context=context, settings=settings, chat=chat)
        logger.info("%s is ready with %s", type(self).__name__, settings.model_dump_json(exclude_defaults=True))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode on the next free device; returns the device also after an error.

        Raises:
            EpisodeError: the device, the engine or the task's set-up failed.
        """
        if self._pool is None or self._parts is None:
            raise GeneratorError(f"{type(self).__name__} was not started")
        parts = self._parts
        task = read_task(episode.instance)
        timer = PhaseTimer()
        with timer.phase("acquire"):
            purpose = Purpose.EVALUATION if episode.evaluation else Purpose.TRAINING
            lease = await self._pool.acquire(purpose, self.needs_of(task.name))
        try:
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
        except EnvironmentSetupError as error:
            if error.detail.get("fault") != REFUSED:
                raise
            # The device lost a capability after its last examination. The pool examines a returned device again.
            return await self.play(episode)

    def _needs_by_task(self, read_instances: Callable[[], Iterable[Instance]]) -> dict[str, frozenset[str]]:
        """Returns the needs of each task in the input; a line without a task fails when it is played."""
        needs: dict[str, frozenset[str]] = {}
        for instance in read_instances():
            with contextlib.suppress(EnvironmentSetupError):
                name = read_task(instance).name
                needs[name] = self.needs_of(name)
        return needs

    async def devices(self) -> Mapping[str, Any]:
        """Returns the state of the device pool, as ``DevicePool.snapshot``.

        Raises:
            DeviceError: the pool does not answer, or is not connected yet.
        """
        if self._pool is None:
            raise DeviceError("the device pool is not connected yet")
        return await self._pool.snapshot()

    async def close(self) -> None:
        """Returns the devices; devices on Ray stay up for the next job."""
        if self._pool is not None:
            await self._pool.close()
