"""The Android World generator: phones, their settings, and what is earned on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardSettings
from slime_plugins.rollout_buffer.generator.gui_agent.generator import GuiAgentGenerator


class AndroidWorldGenerator(GuiAgentGenerator[AndroidWorldSettings]):
    """Plays Android World tasks on pooled phones. Give it a ``pool`` to play on devices of your own."""

    def settings_of(self, options: Mapping[str, Any]) -> AndroidWorldSettings:
        """As ``GuiAgentGenerator.settings_of``."""
        return load_settings(options)

    def rewards_of(self, settings: AndroidWorldSettings) -> RewardSettings:
        """As ``GuiAgentGenerator.rewards_of``: by the table in ``rewards``."""
        return settings.reward
