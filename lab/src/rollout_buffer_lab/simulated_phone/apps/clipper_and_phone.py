"""Clipper and Phone: one page each."""

from __future__ import annotations

from functools import partial

from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.glyphs import TextSize
from rollout_buffer_lab.simulated_phone.layout import BarIcon, ScreenBuilder
from rollout_buffer_lab.simulated_phone.widgets import Align

_KEY_ROWS = (("1", "2", "3"), ("4", "5", "6"), ("7", "8", "9"), ("*", "0", "#"))
_MAX_NUMBER = 30


class ClipperApp(App):
    """Puts text on the clipboard and shows what is there."""

    def first_page(self) -> Page:
        """Returns its only page."""
        return _Clipper(self)


class _Clipper(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Clipper")
        screen.field("text", "Text")
        screen.button("Copy", self._copy_text)
        screen.section("On the clipboard")
        screen.paragraph(self.state.clipboard[:1000] or "Nothing")

    def _copy_text(self) -> None:
        self.state.clipboard = self.field_named("text").text


class PhoneApp(App):
    """The dialer. A call is only recorded in its preferences."""

    def first_page(self) -> Page:
        """Returns the keypad."""
        return _Dialer(self)


class _Dialer(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Phone", icons=[BarIcon(icon="backspace", on_tap=self._erase)])
        screen.space(80)
        screen.paragraph(self._number or " ", size=TextSize.TITLE, align=Align.CENTER)
        screen.space(80)
        for keys in _KEY_ROWS:
            screen.button_row([(key, partial(self._press, key)) for key in keys], height=176)
        screen.space(32)
        screen.button("Call", self._call)
        called = self.app.preferences.get("last_called", "")
        if called:
            screen.section(f"Last called: {called}")

    @property
    def _number(self) -> str:
        return self.app.preferences.get("number", "")

    def _press(self, key: str) -> None:
        self.app.preferences["number"] = (self._number + key)[:_MAX_NUMBER]

    def _erase(self) -> None:
        self.app.preferences["number"] = self._number[:-1]

    def _call(self) -> None:
        if self._number:
            self.app.preferences.update(last_called=self._number, number="")
