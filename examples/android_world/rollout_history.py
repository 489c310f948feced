"""``--custom-generate-function-path examples.android_world.rollout_history.generate``: one prompt and row per turn."""

from slime_plugins.rollout_buffer.generator.android_world.custom_generate import generate_history as generate

__all__ = ["generate"]
