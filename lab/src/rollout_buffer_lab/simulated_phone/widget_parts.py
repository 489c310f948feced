"""Makes single widgets for layouts, and clips widgets to a viewport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize, line_height, text_width
from rollout_buffer_lab.simulated_phone.palette import Surface, TextColor
from rollout_buffer_lab.simulated_phone.widgets import Align, Handler, SlideHandler, Widget, WidgetKind

TRACK_MARGIN = 96  # between the sides of the screen and a slider's track
BAR_ICON = 112  # side of an icon in the title bar or in a row
_CUTTABLE = (WidgetKind.ROW, WidgetKind.FILL, WidgetKind.FIELD, WidgetKind.BUBBLE)


def visible_widgets(widgets: Sequence[Widget], viewport: Rect, dy: int) -> list[Widget]:
    """Returns the widgets moved by ``dy`` and clipped to the viewport.

    Widgets of other kinds than ``_CUTTABLE`` are left out if they are only partly visible.
    """
    visible = []
    for widget in widgets:
        bounds = widget.bounds.moved(0, dy)
        clipped = bounds.clipped(viewport)
        if clipped.width <= 0 or clipped.height <= 0:
            continue
        if clipped != bounds and widget.kind not in _CUTTABLE:
            continue
        visible.append(replace(widget, bounds=clipped))
    return visible


def field_height(line_count: int) -> int:
    """Returns the height in pixels of a field with that many lines."""
    return 12 + 56 + line_count * line_height(TextSize.BODY) + 24


def text_widget(
    text: str,
    bounds: Rect,
    size: TextSize = TextSize.BODY,
    color: TextColor = TextColor.PRIMARY,
    align: Align = Align.LEFT,
) -> Widget:
    """Returns one line of text."""
    return Widget(kind=WidgetKind.TEXT, bounds=bounds, text=text, text_size=size, text_color=color, align=align)


def line_widgets(lines: Sequence[str], left: int, top: int, right: int) -> list[Widget]:
    """Returns one widget per line, from top to bottom; empty lines take space but are not drawn."""
    height = line_height(TextSize.BODY)
    return [
        text_widget(line, Rect(left=left, top=top + index * height, right=right, bottom=top + (index + 1) * height))
        for index, line in enumerate(lines)
        if line.strip()
    ]


def highlight_widgets(lines: Sequence[str], left: int, top: int) -> list[Widget]:
    """Returns the highlights behind a field's whole value, one for each line."""
    height = line_height(TextSize.BODY)
    return [
        Widget(
            kind=WidgetKind.ROW,
            bounds=Rect(
                left=left - 8,
                top=top + index * height,
                right=left + 8 + text_width(line, TextSize.BODY),
                bottom=top + (index + 1) * height,
            ),
            surface=Surface.FIELD_SELECTION,
        )
        for index, line in enumerate(lines)
    ]


def cursor_widget(lines: Sequence[str], left: int, top: int) -> Widget:
    """Returns the cursor after the last line."""
    height = line_height(TextSize.BODY)
    x, y = left + text_width(lines[-1], TextSize.BODY) + 4, top + (len(lines) - 1) * height
    bounds = Rect(left=x, top=y + 4, right=x + 4, bottom=y + height - 8)
    return Widget(kind=WidgetKind.ROW, bounds=bounds, surface=Surface.FIELD_EDGE_FOCUSED)


def button_widget(text: str, bounds: Rect, on_tap: Handler, surface: Surface = Surface.BUTTON) -> Widget:
    """Returns a button or a tab."""
    return Widget(
        kind=WidgetKind.BUTTON, bounds=bounds, text=text, surface=surface, align=Align.CENTER, on_tap=on_tap,
        selected=surface is Surface.TAB_SELECTED,
    )  # fmt: skip


def icon_widget(icon: str, left: int, top: int, surface: Surface | None, on_tap: Handler | None) -> Widget:
    """Returns an icon, on a tile if it has a surface."""
    bounds = Rect(left=left, top=top, right=left + BAR_ICON, bottom=top + BAR_ICON)
    return Widget(kind=WidgetKind.ICON, bounds=bounds, icon=icon, surface=surface, on_tap=on_tap)


def row_slide_handler(on_slide: SlideHandler) -> SlideHandler:
    """Returns a handler for slides on the row, which converts their positions into positions on the slider's track."""
    margin = TRACK_MARGIN / SCREEN_WIDTH
    return lambda share: on_slide(min(1.0, max(0.0, (share - margin) / (1 - 2 * margin))))
