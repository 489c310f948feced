"""Loss masks of one's own, in ``slime_plugins.rollout_buffer.trainer.masks``; this name goes with the next release."""

from slime.rollout.agent_rollout_settings import read_mask_settings
from slime_plugins.rollout_buffer.trainer.masks import (
    ClassWithoutRows,
    Masks,
    MaskSettings,
    check_masks,
    mask_generator,
)

__all__ = [
    "ClassWithoutRows",
    "MaskSettings",
    "Masks",
    "check_masks",
    "mask_generator",
    "read_mask_settings",
]
