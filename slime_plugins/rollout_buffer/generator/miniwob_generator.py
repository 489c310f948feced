"""The task type ``miniwob``; its implementation is in ``miniwob/``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.generator import GuiAgentGenerator
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.gui_agent.settings import devices_run_on_ray
from slime_plugins.rollout_buffer.generator.miniwob.config import MiniWobSettings, load_settings
from slime_plugins.rollout_buffer.generator.miniwob.rewards import PageReward
from slime_plugins.rollout_buffer.generator.miniwob.tool import WEB_PAGE_TOOL

TASK_TYPE = "miniwob"
NEEDS_RAY = partial(devices_run_on_ray, load_settings)
REWARD_RANGE = (-1.0, 1.0)


class MiniWobGenerator(GuiAgentGenerator[MiniWobSettings]):
    """Plays MiniWoB++ tasks on pooled browser pages. ``pool`` replaces the pool of the settings."""

    def settings_of(self, options: Mapping[str, Any]) -> MiniWobSettings:
        return load_settings(options)

    def rewards_of(self, settings: MiniWobSettings) -> PageReward:
        del settings
        return PageReward()

    def view_of(self, settings: MiniWobSettings) -> View:
        return View(tool=WEB_PAGE_TOOL, observation_mode=settings.observation)


def create_generator() -> MiniWobGenerator:
    return MiniWobGenerator()
