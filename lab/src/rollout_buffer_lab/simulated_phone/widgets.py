"""A screen as a list of widgets with bounds, from which it is drawn and in which touches find their target.

Widgets are in drawing order, later ones above earlier ones. Their handlers are not compared, so that screens that look
alike are equal and are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from rollout_buffer_lab.simulated_phone.geometry import Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize
from rollout_buffer_lab.simulated_phone.palette import Surface, TextColor

Handler = Callable[[], None]
SlideHandler = Callable[[float], None]
"""Called with the position along the track, 0 at the left end and 1 at the right end."""


class WidgetKind(StrEnum):
    """How a widget looks, and whether it covers others."""

    FILL = "fill"  # a plain rectangle; keeps touches from the widgets below it
    ROW = "row"  # a touchable area, invisible without a surface
    TEXT = "text"  # one line
    BUTTON = "button"  # rounded, with a text
    ICON = "icon"  # on a tile if it has a surface
    SWITCH = "switch"
    SLIDER = "slider"
    FIELD = "field"  # label, value, cursor
    BUBBLE = "bubble"  # rounded background of a message


class Align(StrEnum):
    """The position of a line within its bounds."""

    LEFT = "left"
    CENTER = "center"
    RIGHT = "right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Widget:
    """One widget. Which fields are used depends on the kind; ``value`` is 0..1 along a slider."""

    kind: WidgetKind
    bounds: Rect
    text: str = ""
    surface: Surface | None = None
    text_size: TextSize = TextSize.BODY
    text_color: TextColor = TextColor.PRIMARY
    align: Align = Align.LEFT
    icon: str = ""
    checked: bool = False
    focused: bool = False
    selected: bool = False
    value: float = 0.0
    lines: tuple[str, ...] = ()
    on_tap: Handler | None = field(default=None, compare=False, repr=False)
    on_long_press: Handler | None = field(default=None, compare=False, repr=False)
    on_slide: SlideHandler | None = field(default=None, compare=False, repr=False)

    @property
    def touchable(self) -> bool:
        """True if the widget has a handler."""
        return any((self.on_tap, self.on_long_press, self.on_slide))


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """What the display shows. ``viewport`` is the area that scrolls; ``max_scroll`` is 0 if the page fits into it."""

    title: str
    widgets: tuple[Widget, ...]
    viewport: Rect | None = None
    scroll: int = 0
    max_scroll: int = 0

    def widget_at(self, x: int, y: int) -> Widget | None:
        """Returns the topmost touchable widget at the point; None if nothing there reacts."""
        for widget in reversed(self.widgets):
            if not widget.bounds.contains(x, y):
                continue
            if widget.touchable:
                return widget
            if widget.kind is WidgetKind.FILL:
                return None
        return None
