"""The Android World generator: phones, their settings, and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardSettings
from slime_plugins.rollout_buffer.generator.android_world.task_needs import needs_of
from slime_plugins.rollout_buffer.generator.gui_agent.generator import GuiAgentGenerator


class AndroidWorldGenerator(GuiAgentGenerator[AndroidWorldSettings]):
    """Plays Android World tasks on pooled phones. ``pool`` replaces the pool of the settings."""

    def settings_of(self, options: Mapping[str, Any]) -> AndroidWorldSettings:
        return load_settings(options)

    def needs_of(self, task_name: str) -> frozenset[str]:
        return needs_of(task_name)

    def rewards_of(self, settings: AndroidWorldSettings) -> RewardSettings:
        return settings.reward
