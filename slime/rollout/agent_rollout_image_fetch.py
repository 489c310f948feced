"""Image fetch, in ``slime_plugins.rollout_buffer.trainer.image_fetch``; this name goes with the next release."""

from slime_plugins.rollout_buffer.trainer.image_fetch import (
    FetchedImages,
    ImageCache,
    ImageFetcher,
    process_cache,
)

__all__ = [
    "FetchedImages",
    "ImageCache",
    "ImageFetcher",
    "process_cache",
]
