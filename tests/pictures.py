"""Pictures of one colour, as the PNG files that tests send and train on."""

from __future__ import annotations

import io

from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.types import Image

Color = str | int | tuple[int, int, int]


def png(size: tuple[int, int], color: Color, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    PillowImage.new(mode, size, color).save(file, "PNG")
    return file.getvalue()


def picture(width: int, height: int, color: Color = (20, 90, 200)) -> Image:
    return Image(data=png((width, height), color))
