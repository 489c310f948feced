"""Lays out a page: bars on top and bottom, a list that scrolls between them, dialogs.

A page calls the builder's methods from top to bottom; ``build`` returns the screen. Lengths are even numbers of device
pixels (see ``geometry``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout_buffer_lab.simulated_phone.fields import FieldHost
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize, line_height, shorten, text_width, wrap
from rollout_buffer_lab.simulated_phone.palette import Surface, TextColor
from rollout_buffer_lab.simulated_phone.widget_parts import (
    BAR_ICON,
    TRACK_MARGIN,
    button_widget,
    cursor_widget,
    field_height,
    highlight_widgets,
    icon_widget,
    line_widgets,
    row_slide_handler,
    text_widget,
    visible_widgets,
)
from rollout_buffer_lab.simulated_phone.widgets import Align, Handler, Screen, SlideHandler, Widget, WidgetKind

STATUS_BAR_HEIGHT = 80
_TITLE_BAR_HEIGHT = 160
_PADDING = 48
_BUTTON_HEIGHT = 112
_FIELD_PADDING = 24
_TAB_HEIGHT = 144
_MAX_FIELD_LINES = 4  # of a field that is not multi_line; its text is wrapped too
_SWITCH_WIDTH, _SWITCH_HEIGHT = 120, 72
_DIALOG_MARGIN = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class BarIcon:
    """An icon in the title bar, or in a row of icons."""

    icon: str
    on_tap: Handler


@dataclass(frozen=True, kw_only=True, slots=True)
class Tab:
    """One of the tabs at the bottom."""

    text: str
    selected: bool
    on_tap: Handler


class ScreenBuilder:
    """Collects the widgets of one screen. ``bottom`` is where the page ends: above the keyboard, if it is shown."""

    def __init__(self, *, host: FieldHost, scroll: int = 0, bottom: int = SCREEN_HEIGHT) -> None:
        self._host = host
        self._scroll = scroll
        self._top = STATUS_BAR_HEIGHT
        self._bottom = bottom
        self._left, self._right = 0, SCREEN_WIDTH
        self._title = ""
        self._is_dialog = False
        self._y = 0
        self._body: list[Widget] = []
        self._fixed: list[Widget] = []

    @property
    def content_width(self) -> int:
        """The width between the paddings."""
        return self._right - self._left - 2 * _PADDING

    @property
    def room_left(self) -> int:
        """The height between the parts so far and the end of the page."""
        return self._bottom - self._top - self._y

    # Bars

    def title_bar(
        self,
        title: str,
        *,
        on_back: Handler | None = None,
        icons: Sequence[BarIcon] = (),
        buttons: Sequence[tuple[str, Handler]] = (),
    ) -> None:
        """Adds the bar on top: back arrow and title, then icons and buttons from the right."""
        top, bottom = STATUS_BAR_HEIGHT, STATUS_BAR_HEIGHT + _TITLE_BAR_HEIGHT
        self._top, self._title = bottom, title
        bar = Rect(left=0, top=top, right=SCREEN_WIDTH, bottom=bottom)
        self._fixed.append(Widget(kind=WidgetKind.FILL, bounds=bar, surface=Surface.TITLE_BAR))
        left, right = _PADDING, SCREEN_WIDTH - 24
        if on_back is not None:
            self._fixed.append(icon_widget("back", 24, top + 24, Surface.ICON_BUTTON, on_back))
            left = 24 + BAR_ICON + 32
        for item in reversed(icons):
            right -= BAR_ICON
            self._fixed.append(icon_widget(item.icon, right, top + 24, Surface.ICON_BUTTON, item.on_tap))
            right -= 24
        for text, handler in reversed(buttons):
            width = text_width(text, TextSize.BODY) + 2 * _PADDING
            width += width % 2
            bounds = Rect(left=right - width, top=top + 24, right=right, bottom=top + 24 + _BUTTON_HEIGHT)
            self._fixed.append(button_widget(text, bounds, handler))
            right -= width + 24
        bounds = Rect(left=left, top=top, right=right - 24, bottom=bottom)
        self._fixed.append(text_widget(shorten(title, TextSize.TITLE, bounds.width), bounds, TextSize.TITLE))

    def tabs(self, tabs: Sequence[Tab]) -> None:
        """Adds the bar of tabs at the bottom."""
        top = self._bottom - _TAB_HEIGHT
        width = SCREEN_WIDTH // len(tabs)
        width -= width % 2
        for index, tab in enumerate(tabs):
            surface = Surface.TAB_SELECTED if tab.selected else Surface.TAB
            bounds = Rect(left=index * width + 4, top=top + 4, right=(index + 1) * width - 4, bottom=self._bottom - 4)
            self._fixed.append(button_widget(tab.text, bounds, tab.on_tap, surface))
        self._bottom = top

    def footer_field(self, key: str, label: str, button: str, on_button: Handler) -> None:
        """Adds a field with a button next to it, at the bottom."""
        button_width = text_width(button, TextSize.BODY) + 2 * _PADDING
        button_width += button_width % 2
        value_width = SCREEN_WIDTH - button_width - 72 - 2 * _FIELD_PADDING
        lines = wrap(self._host.field_named(key).text, TextSize.BODY, value_width)[-_MAX_FIELD_LINES:]
        height = field_height(len(lines))
        top = self._bottom - height - 32
        bar = Rect(left=0, top=top, right=SCREEN_WIDTH, bottom=self._bottom)
        self._fixed.append(Widget(kind=WidgetKind.FILL, bounds=bar, surface=Surface.SCREEN))
        bounds = Rect(left=24, top=top + 16, right=SCREEN_WIDTH - button_width - 48, bottom=self._bottom - 16)
        self._fixed.extend(self._field_widgets(key, label, bounds, lines))
        right = SCREEN_WIDTH - 24
        button_top = bounds.bottom - _BUTTON_HEIGHT - 16
        button_bounds = Rect(left=right - button_width, top=button_top, right=right, bottom=button_top + _BUTTON_HEIGHT)
        self._fixed.append(button_widget(button, button_bounds, on_button))
        self._bottom = top

    def floating_icon(self, icon: str, on_tap: Handler) -> None:
        """Adds the large icon in the lower right corner."""
        left, top = SCREEN_WIDTH - 208, self._bottom - 224
        bounds = Rect(left=left, top=top, right=left + 160, bottom=top + 160)
        self._fixed.append(
            Widget(kind=WidgetKind.ICON, bounds=bounds, icon=icon, surface=Surface.ICON_BUTTON, on_tap=on_tap)
        )

    def dialog(self, title: str) -> None:
        """Makes the page a dialog: the parts after this call are in a box over a dark background."""
        self._is_dialog = True
        self._left, self._right = _DIALOG_MARGIN, SCREEN_WIDTH - _DIALOG_MARGIN
        self._y += 32
        self.paragraph(title, size=TextSize.TITLE)

    # What scrolls

    def space(self, height: int) -> None:
        """Leaves ``height`` pixels empty."""
        self._y += height

    def section(self, text: str) -> None:
        """Adds a small header."""
        self._y += 24
        self.paragraph(text, size=TextSize.SMALL, color=TextColor.SECONDARY)

    def paragraph(
        self,
        text: str,
        *,
        size: TextSize = TextSize.BODY,
        color: TextColor = TextColor.PRIMARY,
        align: Align = Align.LEFT,
    ) -> None:
        """Adds text over the whole width, wrapped."""
        for line in wrap(text, size, self.content_width):
            bounds = self._across(line_height(size))
            self._body.append(text_widget(line, bounds, size, color, align))
            self._y += line_height(size)

    def row(
        self,
        text: str,
        *,
        secondary: str = "",
        icon: str = "",
        on_tap: Handler | None = None,
        on_long_press: Handler | None = None,
        selected: bool = False,
    ) -> None:
        """Adds an entry of a list: a line, a smaller one below it, an icon before them."""
        bounds = self._row_background(176 if secondary else 144, on_tap, on_long_press, selected, text)
        left = bounds.left + _PADDING
        if icon:
            self._body.append(icon_widget(icon, left - 16, bounds.top + (bounds.height - BAR_ICON) // 2, None, None))
            left += BAR_ICON
        self._row_texts(text, secondary, replace(bounds, left=left, right=bounds.right - _PADDING))

    def switch_row(self, text: str, checked: bool, on_toggle: Handler, *, secondary: str = "") -> None:
        """Adds an entry with a switch at its right end; the whole row toggles it."""
        bounds = self._row_background(176 if secondary else 144, on_toggle, None, False, text)
        left = bounds.right - _PADDING - _SWITCH_WIDTH
        top = bounds.top + (bounds.height - _SWITCH_HEIGHT) // 2
        self._row_texts(text, secondary, replace(bounds, left=bounds.left + _PADDING, right=left - _PADDING))
        switch = Rect(left=left, top=top, right=left + _SWITCH_WIDTH, bottom=top + _SWITCH_HEIGHT)
        self._body.append(Widget(kind=WidgetKind.SWITCH, bounds=switch, checked=checked, text=text, on_tap=on_toggle))

    def slider_row(self, text: str, value: float, on_slide: SlideHandler) -> None:
        """Adds a line with a slider below it; ``value`` is 0..1."""
        bounds = self._row_background(224, None, None, False, text, on_slide=row_slide_handler(on_slide))
        label = replace(bounds, left=bounds.left + _PADDING, top=bounds.top + 24, bottom=bounds.top + 88)
        self._body.append(text_widget(text, label))
        track = Rect(
            left=bounds.left + TRACK_MARGIN,
            top=bounds.top + 112,
            right=bounds.right - TRACK_MARGIN,
            bottom=bounds.top + 184,
        )
        self._body.append(
            Widget(kind=WidgetKind.SLIDER, bounds=track, value=min(1.0, max(0.0, value)), text=text, on_slide=on_slide)
        )

    def field(self, key: str, label: str, *, fill_page: bool = False) -> None:
        """Adds a text field over the whole width; ``fill_page`` makes it reach at least to the end of the page."""
        self._y += 16
        width = self.content_width - 2 * _FIELD_PADDING
        field = self._host.field_named(key)
        lines = wrap(field.text, TextSize.BODY, width)
        if not field.multi_line:
            lines = lines[-_MAX_FIELD_LINES:]
        height = field_height(len(lines))
        if fill_page:
            height = max(height, self.room_left - 16)
        self._body.extend(self._field_widgets(key, label, self._across(height - height % 2), lines))
        self._y += height - height % 2 + 16

    def button(self, text: str, on_tap: Handler) -> None:
        """Adds a button over the whole width."""
        self.button_row([(text, on_tap)])

    def button_row(self, buttons: Sequence[tuple[str, Handler]], *, height: int = _BUTTON_HEIGHT) -> None:
        """Adds buttons side by side, which share the width."""
        self._y += 16
        width = (self.content_width - 24 * (len(buttons) - 1)) // len(buttons)
        width -= width % 2
        for index, (text, handler) in enumerate(buttons):
            left = self._left + _PADDING + index * (width + 24)
            self._body.append(
                button_widget(text, Rect(left=left, top=self._y, right=left + width, bottom=self._y + height), handler)
            )
        self._y += height + 16

    def icon_row(self, icons: Sequence[BarIcon]) -> None:
        """Adds icons side by side in the middle."""
        side = 160
        left = (self._left + self._right - len(icons) * (side + 64) + 64) // 2
        for item in icons:
            bounds = Rect(left=left - left % 2, top=self._y, right=left - left % 2 + side, bottom=self._y + side)
            self._body.append(
                Widget(
                    kind=WidgetKind.ICON, bounds=bounds, icon=item.icon, surface=Surface.ICON_BUTTON, on_tap=item.on_tap
                )
            )
            left += side + 64
        self._y += side

    def bubble(self, text: str, *, sent: bool, on_long_press: Handler) -> None:
        """Adds a message: to the right and blue if sent, to the left and green if received."""
        lines = wrap(text, TextSize.BODY, 720)
        width = max(text_width(line, TextSize.BODY) for line in lines) + 64
        width = max(128, width + width % 2)
        height = len(lines) * line_height(TextSize.BODY) + 32
        left = SCREEN_WIDTH - _PADDING - width if sent else _PADDING
        bounds = Rect(left=left, top=self._y + 12, right=left + width, bottom=self._y + 12 + height)
        surface = Surface.BUBBLE_OUT if sent else Surface.BUBBLE_IN
        self._body.append(
            Widget(kind=WidgetKind.BUBBLE, bounds=bounds, surface=surface, on_long_press=on_long_press, lines=lines)
        )
        self._body.extend(line_widgets(lines, left + 32, bounds.top + 16, bounds.right))
        self._y += height + 24

    def place(self, widget: Widget) -> None:
        """Adds a widget at its own bounds, in device pixels; it does not scroll."""
        self._fixed.append(widget)

    # The result

    def build(self) -> Screen:
        """Returns the screen; its scroll position is limited to the height of the page."""
        if self._is_dialog:
            return self._build_dialog()
        viewport = Rect(left=0, top=self._top, right=SCREEN_WIDTH, bottom=max(self._top, self._bottom))
        max_scroll = self._y + 48 - viewport.height if self._y > viewport.height else 0
        max_scroll += max_scroll % 2
        scroll = min(max(0, self._scroll - self._scroll % 2), max_scroll)
        body = visible_widgets(self._body, viewport, viewport.top - scroll)
        return Screen(
            title=self._title,
            widgets=(*body, *self._fixed),
            viewport=viewport,
            scroll=scroll,
            max_scroll=max_scroll,
        )

    def _build_dialog(self) -> Screen:
        height = min(self._y + 32, self._bottom - STATUS_BAR_HEIGHT - 64)
        top = (STATUS_BAR_HEIGHT + self._bottom - height) // 2
        box = Rect(left=self._left, top=top - top % 2, right=self._right, bottom=top - top % 2 + height - height % 2)
        max_scroll = max(0, self._y + 32 - box.height)
        max_scroll += max_scroll % 2
        scroll = min(max(0, self._scroll - self._scroll % 2), max_scroll)
        ground = Rect(left=0, top=STATUS_BAR_HEIGHT, right=SCREEN_WIDTH, bottom=SCREEN_HEIGHT)
        frame = (
            Widget(kind=WidgetKind.FILL, bounds=ground, surface=Surface.SCRIM),
            Widget(kind=WidgetKind.FILL, bounds=box, surface=Surface.DIALOG),
        )
        body = visible_widgets(self._body, box, box.top - scroll)
        return Screen(title="", widgets=(*frame, *body), viewport=box, scroll=scroll, max_scroll=max_scroll)

    # Parts

    def _across(self, height: int) -> Rect:
        return Rect(left=self._left + _PADDING, top=self._y, right=self._right - _PADDING, bottom=self._y + height)

    def _row_background(
        self,
        height: int,
        on_tap: Handler | None,
        on_long_press: Handler | None,
        selected: bool,
        text: str,
        on_slide: SlideHandler | None = None,
    ) -> Rect:
        bounds = Rect(left=self._left, top=self._y, right=self._right, bottom=self._y + height)
        self._body.append(
            Widget(
                kind=WidgetKind.ROW,
                bounds=replace(bounds, bottom=bounds.bottom - 2),
                surface=Surface.ROW_SELECTED if selected else None,
                text=text,
                selected=selected,
                on_tap=on_tap,
                on_long_press=on_long_press,
                on_slide=on_slide,
            )
        )
        line = replace(bounds, left=bounds.left + 24, right=bounds.right - 24, top=bounds.bottom - 2)
        self._body.append(Widget(kind=WidgetKind.ROW, bounds=line, surface=Surface.DIVIDER))
        self._y += height
        return bounds

    def _row_texts(self, text: str, secondary: str, bounds: Rect) -> None:
        top = bounds.top + (28 if secondary else 40)
        first = Rect(left=bounds.left, top=top, right=bounds.right, bottom=top + 64)
        self._body.append(text_widget(shorten(text, TextSize.BODY, bounds.width), first))
        if secondary:
            second = Rect(left=bounds.left, top=top + 64, right=bounds.right, bottom=top + 120)
            line = shorten(secondary, TextSize.SMALL, bounds.width)
            self._body.append(text_widget(line, second, TextSize.SMALL, TextColor.SECONDARY))

    def _field_widgets(self, key: str, label: str, bounds: Rect, lines: tuple[str, ...]) -> list[Widget]:
        field = self._host.field_named(key)
        focused = self._host.focused == key
        left, top = bounds.left + _FIELD_PADDING, bounds.top + 12
        widgets = [
            Widget(
                kind=WidgetKind.FIELD,
                bounds=bounds,
                text=label,
                lines=lines,
                focused=focused,
                selected=field.selected,
                on_tap=lambda: self._host.focus(key),
                on_long_press=lambda: self._host.open_field_menu(key),
            ),
            text_widget(
                label, Rect(left=left, top=top, right=bounds.right, bottom=top + 56), TextSize.SMALL, TextColor.HINT
            ),
        ]
        if field.selected and field.text:
            widgets.extend(highlight_widgets(lines, left, top + 56))
        widgets.extend(line_widgets(lines, left, top + 56, bounds.right))
        if focused:
            widgets.append(cursor_widget(lines, left, top + 56))
        return widgets
