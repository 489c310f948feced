"""The phone's icons: 32x32 dots each (a dot is 2x2 device pixels), drawn from lines and circles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from PIL import Image, ImageDraw

ICON_DOTS = 32
Stroke = Callable[[ImageDraw.ImageDraw], None]


def _box(*corners: int, ink: int = 255, frame: int = 0) -> Stroke:
    """Draws a filled rectangle; with ``frame`` only its edge, of that width."""
    if frame:
        return lambda pen: pen.rectangle(corners, outline=ink, width=frame)
    return lambda pen: pen.rectangle(corners, fill=ink)


def _oval(*corners: int, ink: int = 255, frame: int = 0) -> Stroke:
    if frame:
        return lambda pen: pen.ellipse(corners, outline=ink, width=frame)
    return lambda pen: pen.ellipse(corners, fill=ink)


def _line(*points: int, width: int, ink: int = 255) -> Stroke:
    return lambda pen: pen.line(points, fill=ink, width=width)


def _area(*points: int) -> Stroke:
    return lambda pen: pen.polygon(points, fill=255)


_FOLDER = (_box(3, 9, 28, 27), _box(3, 5, 14, 9))
_ICONS: Mapping[str, tuple[Stroke, ...]] = {
    "back": (_line(4, 16, 28, 16, width=4), _area(4, 16, 14, 5, 14, 27)),
    "add": (_box(14, 4, 17, 27), _box(4, 14, 27, 17)),
    "delete": (
        *(_box(5, 6, 26, 8), _box(12, 3, 19, 5), _box(8, 11, 23, 28)),
        *(_box(x, 14, x + 1, 25, ink=0) for x in (12, 18)),
    ),
    "more": tuple(_box(13, y, 18, y + 5) for y in (4, 13, 22)),
    "move": (*_FOLDER, _box(8, 17, 18, 20, ink=0), lambda pen: pen.polygon((18, 13, 24, 18, 18, 24), fill=0)),
    "rename": (_line(6, 26, 24, 8, width=6), _box(4, 28, 27, 30)),
    "select_all": (_box(4, 4, 27, 27, frame=3), _box(11, 11, 20, 20)),
    "search": (_oval(3, 3, 21, 21, frame=3), _line(19, 19, 29, 29, width=4)),
    "shutter": (_oval(1, 1, 30, 30, frame=3), _oval(7, 7, 24, 24)),
    "record": (_oval(6, 6, 25, 25),),
    "stop": (_box(7, 7, 24, 24),),
    "backspace": (
        _area(2, 16, 11, 6, 29, 6, 29, 26, 11, 26),
        *(_line(15, 11, 24, 20, width=2, ink=0), _line(24, 11, 15, 20, width=2, ink=0)),
    ),
    "shift": (_area(16, 4, 28, 17, 21, 17, 21, 27, 11, 27, 11, 17, 4, 17),),
    "enter": (_line(26, 6, 26, 18, width=3), _line(8, 18, 27, 18, width=3), _area(3, 18, 12, 10, 12, 26)),
    "folder": _FOLDER,
    "file": (_box(7, 3, 24, 28, frame=3), *(_box(11, y, 20, y + 1) for y in (10, 15, 20))),
    "person": (_oval(10, 3, 21, 14), lambda pen: pen.pieslice((4, 17, 27, 42), 180, 360, fill=255)),
    "settings": (
        *(_box(13, 1, 18, 30), _box(1, 13, 30, 18)),
        *(_line(5, 5, 26, 26, width=5), _line(26, 5, 5, 26, width=5)),
        *(_oval(6, 6, 25, 25), _oval(12, 12, 19, 19, ink=0)),
    ),
    "messages": (
        *(_box(2, 4, 29, 22), _area(6, 22, 6, 30, 15, 22)),
        *(_box(x, 11, x + 3, 14, ink=0) for x in (8, 14, 20)),
    ),
    "clock": (_oval(2, 2, 29, 29, frame=3), _line(16, 8, 16, 16, width=3), _line(16, 16, 23, 20, width=3)),
    "note": (
        *(_box(2, 6, 29, 25, frame=2), _line(7, 21, 7, 10, 12, 16, 17, 10, 17, 21, width=2)),
        *(_line(23, 10, 23, 17, width=2), _area(19, 16, 27, 16, 23, 22)),
    ),
    "camera": (_box(2, 9, 29, 26), _box(10, 5, 21, 9), _oval(10, 11, 21, 22, ink=0), _oval(13, 14, 18, 19)),
    "microphone": (
        *(_oval(11, 2, 20, 12), _box(11, 7, 20, 15)),
        lambda pen: pen.arc((6, 6, 25, 23), 0, 180, fill=255, width=2),
        *(_box(15, 23, 16, 29), _box(9, 28, 22, 29)),
    ),
    "calendar": (
        *(_box(3, 5, 28, 29, frame=3), _box(3, 5, 28, 11)),
        *(_box(x, y, x + 3, y + 3) for x in (8, 14, 20) for y in (15, 21)),
    ),
    "clipboard": (_box(5, 5, 26, 30, frame=3), _box(11, 2, 20, 8)),
    "phone": (
        lambda pen: pen.line((7, 6, 10, 16, 16, 23, 26, 26), fill=255, width=5, joint="curve"),
        *(_box(4, 2, 12, 9), _box(22, 20, 29, 28)),
    ),
    "coins": (_oval(2, 2, 29, 29), *(_box(*box, ink=0) for box in ((14, 6, 17, 25), (9, 9, 22, 11), (9, 20, 22, 22)))),
    "wifi": (_area(16, 28, 2, 10, 16, 4, 30, 10),),
    "bluetooth": (_line(8, 9, 23, 22, 16, 28, 16, 3, 23, 9, 8, 22, width=2),),
}

ICON_NAMES = tuple(_ICONS)


@cache
def icon_mask(name: str) -> Image.Image:
    """Returns the icon as a mask ("L", 0 or 255) of 32x32 dots.

    Raises:
        KeyError: no icon has this name.
    """
    mask = Image.new("L", (ICON_DOTS, ICON_DOTS))
    pen = ImageDraw.Draw(mask)
    for draw in _ICONS[name]:
        draw(pen)
    return mask
