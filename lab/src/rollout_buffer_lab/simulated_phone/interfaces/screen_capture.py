"""The screen as pixels, for the emulator's gRPC service and ``screencap``."""

from __future__ import annotations

import io
from functools import lru_cache

from PIL import Image

from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.painting import paint
from rollout_buffer_lab.simulated_phone.widgets import Widget


def rgba_of(phone: EmulatorState) -> tuple[int, int, bytes]:
    """Returns width, height, and four bytes for each pixel, row by row."""
    with phone.lock:
        widgets = phone.ui.screen().widgets
    return _rgba(widgets)


def png_of(phone: EmulatorState) -> bytes:
    """Returns the screen as a PNG file."""
    width, height, pixels = rgba_of(phone)
    buffer = io.BytesIO()
    Image.frombytes("RGBA", (width, height), pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@lru_cache(maxsize=2)
def _rgba(widgets: tuple[Widget, ...]) -> tuple[int, int, bytes]:
    image = paint(widgets).convert("RGBA")
    return image.width, image.height, image.tobytes()
