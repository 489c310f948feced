"""The MiniWoB++ generator: pages in browsers, their settings, and what is earned on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.generator import GuiAgentGenerator
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.context import View
from slime_plugins.rollout_buffer.generator.miniwob.config import MiniWobSettings, load_settings
from slime_plugins.rollout_buffer.generator.miniwob.rewards import PageReward
from slime_plugins.rollout_buffer.generator.miniwob.tool import WEB_PAGE_TOOL


class MiniWobGenerator(GuiAgentGenerator[MiniWobSettings]):
    """Plays MiniWoB++ tasks on pooled browser pages. Give it a ``pool`` to play on devices of your own."""

    def settings_of(self, options: Mapping[str, Any]) -> MiniWobSettings:
        """As ``GuiAgentGenerator.settings_of``."""
        return load_settings(options)

    def rewards_of(self, settings: MiniWobSettings) -> PageReward:
        """As ``GuiAgentGenerator.rewards_of``: what the page says."""
        del settings
        return PageReward()

    def view_of(self, settings: MiniWobSettings) -> View:
        """As ``GuiAgentGenerator.view_of``."""
        return View(tool=WEB_PAGE_TOOL, observation_mode=settings.observation)
