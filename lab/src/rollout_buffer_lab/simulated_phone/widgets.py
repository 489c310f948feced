"""A screen as a list of widgets with bounds: the one source for drawing it and for finding what a touch hits.

Widgets come in drawing order, later ones above earlier ones. What they look like is in their compared fields; what they
do is in their handlers, which take no part in comparison, so that equal screens can share a drawing.
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
"""Called with the place along the track, 0 at the left end and 1 at the right end."""


class WidgetKind(StrEnum):
    """What a widget looks like."""

    FILL = "fill"  # a plain rectangle; stops touches from reaching what is under it
    ROW = "row"  # a touchable area without a look of its own, or marked as selected
    TEXT = "text"  # one line
    BUTTON = "button"  # rounded, with a text
    ICON = "icon"  # a picture, on a tile if it has a surface
    SWITCH = "switch"
    SLIDER = "slider"
    FIELD = "field"  # label, value, cursor
    BUBBLE = "bubble"  # rounded background of a message


class Align(StrEnum):
    """Where a line stands within its bounds."""

    LEFT = "left"
    CENTER = "center"
    RIGHT = "right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Widget:
    """One thing on the screen. Which fields count depends on the kind; ``value`` is 0..1 along a slider."""

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
        """True when some touch does something."""
        return any((self.on_tap, self.on_long_press, self.on_slide))


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """What the display shows. ``viewport`` is where a list scrolls; ``max_scroll`` 0 when all of it fits."""

    title: str
    widgets: tuple[Widget, ...]
    viewport: Rect | None = None
    scroll: int = 0
    max_scroll: int = 0

    def widget_at(self, x: int, y: int) -> Widget | None:
        """The topmost touchable widget under the point; None where nothing reacts."""
        for widget in reversed(self.widgets):
            if not widget.bounds.contains(x, y):
                continue
            if widget.touchable:
                return widget
            if widget.kind is WidgetKind.FILL:
                return None
        return None
