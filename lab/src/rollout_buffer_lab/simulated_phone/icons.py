"""The phone's pictures: 32x32 dots each (two device pixels per dot), drawn from lines and circles."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from PIL import Image, ImageDraw

ICON_DOTS = 32
Pen = ImageDraw.ImageDraw


def _back(pen: Pen) -> None:
    pen.line((4, 16, 28, 16), fill=255, width=4)
    pen.polygon((4, 16, 14, 5, 14, 27), fill=255)


def _add(pen: Pen) -> None:
    pen.rectangle((14, 4, 17, 27), fill=255)
    pen.rectangle((4, 14, 27, 17), fill=255)


def _delete(pen: Pen) -> None:
    pen.rectangle((5, 6, 26, 8), fill=255)
    pen.rectangle((12, 3, 19, 5), fill=255)
    pen.rectangle((8, 11, 23, 28), fill=255)
    for x in (12, 18):
        pen.rectangle((x, 14, x + 1, 25), fill=0)


def _more(pen: Pen) -> None:
    for y in (4, 13, 22):
        pen.rectangle((13, y, 18, y + 5), fill=255)


def _move(pen: Pen) -> None:
    _folder(pen)
    pen.rectangle((8, 17, 18, 20), fill=0)
    pen.polygon((18, 13, 24, 18, 18, 24), fill=0)


def _rename(pen: Pen) -> None:
    pen.line((6, 26, 24, 8), fill=255, width=6)
    pen.rectangle((4, 28, 27, 30), fill=255)


def _select_all(pen: Pen) -> None:
    pen.rectangle((4, 4, 27, 27), outline=255, width=3)
    pen.rectangle((11, 11, 20, 20), fill=255)


def _search(pen: Pen) -> None:
    pen.ellipse((3, 3, 21, 21), outline=255, width=3)
    pen.line((19, 19, 29, 29), fill=255, width=4)


def _shutter(pen: Pen) -> None:
    pen.ellipse((1, 1, 30, 30), outline=255, width=3)
    pen.ellipse((7, 7, 24, 24), fill=255)


def _record(pen: Pen) -> None:
    pen.ellipse((6, 6, 25, 25), fill=255)


def _stop(pen: Pen) -> None:
    pen.rectangle((7, 7, 24, 24), fill=255)


def _backspace(pen: Pen) -> None:
    pen.polygon((2, 16, 11, 6, 29, 6, 29, 26, 11, 26), fill=255)
    pen.line((15, 11, 24, 20), fill=0, width=2)
    pen.line((24, 11, 15, 20), fill=0, width=2)


def _shift(pen: Pen) -> None:
    pen.polygon((16, 4, 28, 17, 21, 17, 21, 27, 11, 27, 11, 17, 4, 17), fill=255)


def _enter(pen: Pen) -> None:
    pen.line((26, 6, 26, 18), fill=255, width=3)
    pen.line((8, 18, 27, 18), fill=255, width=3)
    pen.polygon((3, 18, 12, 10, 12, 26), fill=255)


def _folder(pen: Pen) -> None:
    pen.rectangle((3, 9, 28, 27), fill=255)
    pen.rectangle((3, 5, 14, 9), fill=255)


def _file(pen: Pen) -> None:
    pen.rectangle((7, 3, 24, 28), outline=255, width=3)
    for y in (10, 15, 20):
        pen.rectangle((11, y, 20, y + 1), fill=255)


def _person(pen: Pen) -> None:
    pen.ellipse((10, 3, 21, 14), fill=255)
    pen.pieslice((4, 17, 27, 42), 180, 360, fill=255)


def _settings(pen: Pen) -> None:
    for box in ((13, 1, 18, 30), (1, 13, 30, 18)):
        pen.rectangle(box, fill=255)
    pen.line((5, 5, 26, 26), fill=255, width=5)
    pen.line((26, 5, 5, 26), fill=255, width=5)
    pen.ellipse((6, 6, 25, 25), fill=255)
    pen.ellipse((12, 12, 19, 19), fill=0)


def _messages(pen: Pen) -> None:
    pen.rectangle((2, 4, 29, 22), fill=255)
    pen.polygon((6, 22, 6, 30, 15, 22), fill=255)
    for x in (8, 14, 20):
        pen.rectangle((x, 11, x + 3, 14), fill=0)


def _clock(pen: Pen) -> None:
    pen.ellipse((2, 2, 29, 29), outline=255, width=3)
    pen.line((16, 8, 16, 16), fill=255, width=3)
    pen.line((16, 16, 23, 20), fill=255, width=3)


def _note(pen: Pen) -> None:
    pen.rectangle((2, 6, 29, 25), outline=255, width=2)
    pen.line((7, 21, 7, 10, 12, 16, 17, 10, 17, 21), fill=255, width=2)
    pen.line((23, 10, 23, 17), fill=255, width=2)
    pen.polygon((19, 16, 27, 16, 23, 22), fill=255)


def _camera(pen: Pen) -> None:
    pen.rectangle((2, 9, 29, 26), fill=255)
    pen.rectangle((10, 5, 21, 9), fill=255)
    pen.ellipse((10, 11, 21, 22), fill=0)
    pen.ellipse((13, 14, 18, 19), fill=255)


def _microphone(pen: Pen) -> None:
    pen.ellipse((11, 2, 20, 12), fill=255)
    pen.rectangle((11, 7, 20, 15), fill=255)
    pen.arc((6, 6, 25, 23), 0, 180, fill=255, width=2)
    pen.rectangle((15, 23, 16, 29), fill=255)
    pen.rectangle((9, 28, 22, 29), fill=255)


def _calendar(pen: Pen) -> None:
    pen.rectangle((3, 5, 28, 29), outline=255, width=3)
    pen.rectangle((3, 5, 28, 11), fill=255)
    for x in (8, 14, 20):
        for y in (15, 21):
            pen.rectangle((x, y, x + 3, y + 3), fill=255)


def _clipboard(pen: Pen) -> None:
    pen.rectangle((5, 5, 26, 30), outline=255, width=3)
    pen.rectangle((11, 2, 20, 8), fill=255)


def _phone(pen: Pen) -> None:
    pen.line((7, 6, 10, 16, 16, 23, 26, 26), fill=255, width=5, joint="curve")
    pen.rectangle((4, 2, 12, 9), fill=255)
    pen.rectangle((22, 20, 29, 28), fill=255)


def _coins(pen: Pen) -> None:
    pen.ellipse((2, 2, 29, 29), fill=255)
    pen.rectangle((14, 6, 17, 25), fill=0)
    pen.rectangle((9, 9, 22, 11), fill=0)
    pen.rectangle((9, 20, 22, 22), fill=0)


def _wifi(pen: Pen) -> None:
    pen.polygon((16, 28, 2, 10, 16, 4, 30, 10), fill=255)


def _bluetooth(pen: Pen) -> None:
    pen.line((8, 9, 23, 22, 16, 28, 16, 3, 23, 9, 8, 22), fill=255, width=2)


_DRAWINGS: dict[str, Callable[[Pen], None]] = {
    "back": _back,
    "add": _add,
    "delete": _delete,
    "more": _more,
    "move": _move,
    "rename": _rename,
    "select_all": _select_all,
    "search": _search,
    "shutter": _shutter,
    "record": _record,
    "stop": _stop,
    "backspace": _backspace,
    "shift": _shift,
    "enter": _enter,
    "folder": _folder,
    "file": _file,
    "person": _person,
    "settings": _settings,
    "messages": _messages,
    "clock": _clock,
    "note": _note,
    "camera": _camera,
    "microphone": _microphone,
    "calendar": _calendar,
    "clipboard": _clipboard,
    "phone": _phone,
    "coins": _coins,
    "wifi": _wifi,
    "bluetooth": _bluetooth,
}

ICON_NAMES = tuple(_DRAWINGS)


@cache
def icon_mask(name: str) -> Image.Image:
    """Returns the picture as a mask ("L", 0 or 255) of 32x32 dots.

    Raises:
        KeyError: no icon has this name.
    """
    mask = Image.new("L", (ICON_DOTS, ICON_DOTS))
    _DRAWINGS[name](ImageDraw.Draw(mask))
    return mask
