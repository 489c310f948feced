"""The task type ``miniwob``; its implementation is in ``miniwob/``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.miniwob.config import load_settings
from slime_plugins.rollout_buffer.generator.miniwob.generator import MiniWobGenerator

TASK_TYPE = "miniwob"


def NEEDS_RAY() -> bool:  # noqa: N802 - the name that the registry looks for
    """Returns True if this host's pages live in a Ray cluster; invalid settings are reported when a job starts."""
    try:
        return load_settings({}).device_pool is PoolKind.RAY
    except ConfigError:
        return False


REWARD_RANGE = (-1.0, 1.0)


def create_generator() -> MiniWobGenerator:
    return MiniWobGenerator()
