"""The task type ``android_world``; its implementation is in ``android_world/``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardSettings
from slime_plugins.rollout_buffer.generator.android_world.task_needs import needs_of
from slime_plugins.rollout_buffer.generator.gui_agent.generator import GuiAgentGenerator
from slime_plugins.rollout_buffer.generator.gui_agent.settings import devices_run_on_ray

TASK_TYPE = "android_world"
NEEDS_RAY = partial(devices_run_on_ray, load_settings)
REWARD_RANGE = (-0.5, 1.5)
"""Bounds for every setting that ``RewardSettings`` accepts: from the full penalty, -0.5, to unscaled success (the step
scale is at most 1, because its decay cannot be negative) plus the largest bonus, 0.5. With the shipped constants
rewards lie in [-0.5, 1.1]."""


class AndroidWorldGenerator(GuiAgentGenerator[AndroidWorldSettings]):
    """Plays Android World tasks on pooled phones. ``pool`` replaces the pool of the settings."""

    def settings_of(self, options: Mapping[str, Any]) -> AndroidWorldSettings:
        return load_settings(options)

    def needs_of(self, task_name: str) -> frozenset[str]:
        return needs_of(task_name)

    def rewards_of(self, settings: AndroidWorldSettings) -> RewardSettings:
        return settings.reward


def create_generator() -> AndroidWorldGenerator:
    return AndroidWorldGenerator()
