"""``--custom-generate-function-path examples.android_world.rollout.generate``: one growing sequence per episode."""

from slime_plugins.rollout_buffer.generator.android_world.custom_generate import generate_incremental as generate

__all__ = ["generate"]
