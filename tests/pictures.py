"""Pictures of one colour, as the PNG files that tests send and train on."""

from __future__ import annotations

import io

from PIL import Image


def png(size: tuple[int, int], color: str | int | tuple[int, int, int], mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, "PNG")
    return file.getvalue()
