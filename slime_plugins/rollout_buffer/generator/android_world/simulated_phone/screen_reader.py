"""Reads a screenshot the way a person does: what is written where, what is on or off, what can be tapped.

``read_screen(image_bytes) -> ReadScreen`` decides from pixels alone. It knows the phone's font, colours and icons (as a
person who has used the phone does) and nothing else: no hidden marks, no side channel.
"""

from __future__ import annotations

from slime_plugins.rollout_buffer.generator.android_world.simulated_phone.screen_records import (
    Button,
    Field,
    Icon,
    ReadScreen,
    Slider,
    Switch,
    TextLine,
    TextRole,
)

__all__ = ["Button", "Field", "Icon", "ReadScreen", "Slider", "Switch", "TextLine", "TextRole", "read_screen"]


def read_screen(image_bytes: bytes) -> ReadScreen:
    """Returns what the screenshot shows; PNG or JPEG, at 1080x2400 or halved (other sizes: as well as it can).

    Raises:
        ValueError: the bytes are no image.
    """
    raise NotImplementedError("the record types are published ahead of the reading")
