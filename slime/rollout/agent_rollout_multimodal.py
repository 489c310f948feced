"""Vision models, in ``slime_plugins.rollout_buffer.trainer.vision``; this name goes with the next release."""

from slime_plugins.rollout_buffer.trainer.vision import (
    FAMILIES,
    ImageFeatures,
    ImageMismatchError,
    ImageProblemError,
    ImageUnavailableError,
    QwenVision,
    RowImages,
    RowInputs,
    VisionFamily,
    load_vision,
    shown_in_messages,
)

__all__ = [
    "FAMILIES",
    "ImageFeatures",
    "ImageMismatchError",
    "ImageProblemError",
    "ImageUnavailableError",
    "QwenVision",
    "RowImages",
    "RowInputs",
    "VisionFamily",
    "load_vision",
    "shown_in_messages",
]
