"""The on-screen keyboard: its keys as widgets, over the lower third of the screen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.palette import Surface
from rollout_buffer_lab.simulated_phone.widgets import Align, Handler, Widget, WidgetKind

KEYBOARD_TOP = 1560
_ROW_HEIGHT = 160
_KEY_WIDTH = 108
_ROWS = ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm")
_LAST_ROW = ((",", 108), ("@", 108), (" ", 540), (".", 108))


def keyboard_widgets(
    shifted: bool, on_text: Callable[[str], None], on_shift: Handler, on_erase: Handler, on_enter: Handler
) -> tuple[Widget, ...]:
    """Returns the keyboard's widgets. A character key calls ``on_text``; with ``shifted`` letters are capitals."""
    ground = Rect(left=0, top=KEYBOARD_TOP, right=SCREEN_WIDTH, bottom=SCREEN_HEIGHT)
    widgets = [Widget(kind=WidgetKind.FILL, bounds=ground, surface=Surface.KEYBOARD)]
    for number, row in enumerate(_ROWS):
        left = (SCREEN_WIDTH - len(row) * _KEY_WIDTH) // 2
        for index, letter in enumerate(row.upper() if shifted else row):
            bounds = _key_bounds(number, left + index * _KEY_WIDTH, _KEY_WIDTH)
            widgets.append(_key(letter, bounds, partial(on_text, letter)))
    widgets.append(_icon_key("shift", _key_bounds(3, 0, 160), on_shift))
    widgets.append(_icon_key("backspace", _key_bounds(3, SCREEN_WIDTH - 160, 160), on_erase))
    left = 0
    for text, width in _LAST_ROW:
        widgets.append(_key(text, _key_bounds(4, left, width), partial(on_text, text)))
        left += width
    widgets.append(_icon_key("enter", _key_bounds(4, left, SCREEN_WIDTH - left), on_enter))
    return tuple(widgets)


def _key_bounds(row: int, left: int, width: int) -> Rect:
    top = KEYBOARD_TOP + 16 + row * _ROW_HEIGHT
    return Rect(left=left + 6, top=top + 6, right=left + width - 6, bottom=top + _ROW_HEIGHT - 6)


def _key(text: str, bounds: Rect, on_tap: Handler) -> Widget:
    return Widget(
        kind=WidgetKind.BUTTON, bounds=bounds, text=text, surface=Surface.KEY, align=Align.CENTER, on_tap=on_tap
    )


def _icon_key(icon: str, bounds: Rect, on_tap: Handler) -> Widget:
    return Widget(kind=WidgetKind.ICON, bounds=bounds, icon=icon, surface=Surface.KEY, on_tap=on_tap)
