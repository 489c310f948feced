"""The task type ``statelm``; its implementation is in ``context_editing/``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.generator.context_editing.generator import ContextEditingGenerator
from slime_plugins.rollout_buffer.generator.context_editing.settings import LOWEST_PENALTY, OPTION_SECTIONS

__all__ = ["OPTION_SECTIONS", "REQUIRED_KEYS", "REWARD_RANGE", "TASK_TYPE", "create_generator"]

TASK_TYPE = "statelm"
REQUIRED_KEYS = ("tokenizer_path",)

REWARD_RANGE = (LOWEST_PENALTY, 1.0)
"""From the largest allowed penalty for a full context to the score of a right answer."""


def create_generator() -> ContextEditingGenerator:
    return ContextEditingGenerator()
