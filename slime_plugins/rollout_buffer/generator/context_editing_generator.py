"""What the registry finds under the task type ``statelm``. The package behind it is ``context_editing/``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.generator.context_editing.generator import ContextEditingGenerator
from slime_plugins.rollout_buffer.generator.context_editing.settings import LOWEST_PENALTY

TASK_TYPE = "statelm"
REQUIRED_KEYS = ("tokenizer_path",)

REWARD_RANGE = (LOWEST_PENALTY, 1.0)
"""From the largest penalty that the settings take for a full context to a right answer."""


def create_generator() -> ContextEditingGenerator:
    """Returns a generator that is not started yet."""
    return ContextEditingGenerator()
