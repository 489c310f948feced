"""Android World behind slime's multi-turn environment interface."""

from slime_plugins.rollout_buffer.generator.android_world.custom_generate import build_env
from slime_plugins.rollout_buffer.generator.android_world.interaction_env import AndroidWorldEnv

__all__ = ["AndroidWorldEnv", "build_env"]
