"""What every agent at a screen can be told, whatever stands behind the screen: how it sees, how long, in which mode."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolSettings
from slime_plugins.rollout_buffer.engine.image_tokens import ImageFamily, family_with


class RolloutMode(StrEnum):
    """How an episode becomes prompts."""

    INCREMENTAL = "incremental"  # the token sequence only grows: one training row per episode
    HISTORY = "history"  # a new prompt for every turn, with what was done so far in words: one row per turn


class ImageFormat(StrEnum):
    """How screenshots are encoded; these bytes are stored, sent to the engine and trained on."""

    PNG = "png"
    JPEG = "jpeg"


class ObservationMode(StrEnum):
    """What the agent is shown of the screen."""

    SCREENSHOT = "screenshot"  # a picture
    ELEMENTS = "elements"  # its elements in words, for language-only policies: no picture in any prompt
    BOTH = "both"  # the picture, and the elements after it


class GuiAgentSettings(PoolSettings):
    """Settings that a task with a screen has in common with the others. A task inherits them and adds its own."""

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
    """The common settings that a job may override, because they are no business of the host's."""

    rollout_mode: RolloutMode = RolloutMode.INCREMENTAL
    history_images: int = Field(default=1, ge=1)
    max_turns: int | None = Field(default=None, ge=1)
    max_context_len: int = Field(default=16384, ge=1)
    stop_after_repeats: int | None = Field(default=None, ge=2)
    """An episode ends when the agent did the same at the same screen so many times in a row; None never."""
    image_pixels_per_token: int = Field(default=1024, ge=1)
    ban_vision_tokens: bool = True
    malformed_penalty: float = Field(default=0.0, ge=0, le=1)

    screenshot_max_pixels: int = Field(default=648_000, ge=1024)

    @property
    def image_tokens(self) -> int:
        """About the most tokens one screenshot can become: taken where family or size of it are not known."""
        return -(-self.screenshot_max_pixels // self.image_pixels_per_token)

    @property
    def image_family(self) -> ImageFamily | None:
        """The models whose image tokens cover ``image_pixels_per_token``; None when no known family's do."""
        return family_with(self.image_pixels_per_token)

    def for_devices(self) -> DevicePoolSettings:
        """Returns what the pool is told: the farm, and of the host's side what makes a device. Jobs have no part."""
        raise NotImplementedError(f"{type(self).__name__} must say how its devices are made")
