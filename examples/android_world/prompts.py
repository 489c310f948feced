"""The prompt texts, under the names of the guides."""

from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    FIRST_TURN_TEMPLATE as ANDROID_WORLD_TEMPLATE_NO_HIS,
)
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    HISTORY_TURN_TEMPLATE as ANDROID_WORLD_TEMPLATE,
)
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    LATER_TURN_TEMPLATE as ANDROID_WORLD_TEMPLATE_STEP,
)
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    SYSTEM_PROMPT as ANDROID_WORLD_SYSTEM_PROMPT,
)

__all__ = [
    "ANDROID_WORLD_SYSTEM_PROMPT",
    "ANDROID_WORLD_TEMPLATE",
    "ANDROID_WORLD_TEMPLATE_NO_HIS",
    "ANDROID_WORLD_TEMPLATE_STEP",
]
