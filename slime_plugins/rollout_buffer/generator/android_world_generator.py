"""The task type ``android_world``; its implementation is in ``android_world/``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.config import load_settings
from slime_plugins.rollout_buffer.generator.android_world.generator import AndroidWorldGenerator

TASK_TYPE = "android_world"


def NEEDS_RAY() -> bool:  # noqa: N802 - the name that the registry looks for
    """Returns True if this host's devices live in a Ray cluster; invalid settings are reported when a job starts."""
    try:
        return load_settings({}).device_pool is PoolKind.RAY
    except ConfigError:
        return False


REWARD_RANGE = (-0.5, 1.5)
"""Bounds for every setting that ``RewardSettings`` accepts: from the full penalty, -0.5, to unscaled success (the step
scale is at most 1, because its decay cannot be negative) plus the largest bonus, 0.5. With the shipped constants
rewards lie in [-0.5, 1.1]."""


def create_generator() -> AndroidWorldGenerator:
    return AndroidWorldGenerator()
