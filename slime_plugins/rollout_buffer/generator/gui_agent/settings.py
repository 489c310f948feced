"""Common settings of agents on a screen: observations, limits, rollout mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind, PoolSettings
from slime_plugins.rollout_buffer.errors import ConfigError


class RolloutMode(StrEnum):
    """How an episode is rendered as prompts."""

    INCREMENTAL = "incremental"  # the token sequence only grows: one training row per episode
    HISTORY = "history"  # a new prompt for every turn, with earlier steps as text: one row per turn


class ImageFormat(StrEnum):
    """Encoding of screenshots; these bytes are stored, sent to the engine and trained on."""

    PNG = "png"
    JPEG = "jpeg"


class ObservationMode(StrEnum):
    """The form of observations in prompts."""

    SCREENSHOT = "screenshot"  # a picture
    ELEMENTS = "elements"  # the elements of the screen as text, for language-only policies: no picture in any prompt
    BOTH = "both"  # the picture, and the elements after it


class GuiAgentSettings(PoolSettings):
    """Common settings of task types with a screen. Each task type inherits and extends them."""

    OF_EPISODES: ClassVar[frozenset[str]] = frozenset(
        {
            "rollout_mode",
            "history_images",
            "max_turns",
            "max_context_len",
            "stop_after_repeats",
            "image_pixels_per_token",
            "ban_vision_tokens",
            "malformed_penalty",
        }
    )
    """The common settings that a job may override."""

    rollout_mode: RolloutMode = RolloutMode.INCREMENTAL
    history_images: int = Field(default=1, ge=1)
    """Number of newest screenshots in a prompt of mode history; prompts of mode incremental keep all screenshots."""
    max_turns: int | None = Field(default=None, ge=1)
    max_context_len: int = Field(default=16384, ge=1)
    stop_after_repeats: int | None = Field(default=None, ge=2)
    """An episode ends when an action was executed this many times in a row on the same screen; None: no limit."""
    image_pixels_per_token: int = Field(default=1024, ge=1)
    ban_vision_tokens: bool = True
    malformed_penalty: float = Field(default=0.0, ge=0, le=1)

    screenshot_max_pixels: int = Field(default=648_000, ge=1024)

    @property
    def image_tokens(self) -> int:
        """An upper estimate of the tokens of one screenshot, for an unknown family or size."""
        return -(-self.screenshot_max_pixels // self.image_pixels_per_token)  # rounded up

    def for_devices(self) -> DevicePoolSettings:
        """Returns the settings of the pool and of its devices, without those of jobs."""
        raise NotImplementedError(f"{type(self).__name__} must return the settings of its devices")


def devices_run_on_ray(load_settings: Callable[[Mapping[str, Any]], PoolSettings]) -> bool:
    """Returns True if this host's devices run in a Ray cluster; False if the settings are invalid, which a job's start
    reports."""
    try:
        return load_settings({}).device_pool is PoolKind.RAY
    except ConfigError:
        return False
