"""What ``screen_reader.read_screen`` finds in a screenshot: texts, buttons, icons, switches, sliders and fields.

Every record has ``bounds`` in device pixels (1080x2400, whatever the size of the screenshot) and ``center`` in the
agent's 0..999 coordinates, ready for a ``mobile_use`` call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from rollout_buffer_lab.simulated_phone.geometry import Rect


class TextRole(StrEnum):
    """The role of a line of text, from its colour and its background."""

    TITLE = "title"  # in the bar on top of an app
    PRIMARY = "primary"  # the main line of a row, a message, a note
    SECONDARY = "secondary"  # the small line below it, section headers
    HINT = "hint"  # label of a field
    BUTTON = "button"  # on a button, a tab or a key
    VALUE = "value"  # inside a field: what was typed
    STATUS = "status"  # in the status bar: the time
    DISPLAY = "display"  # huge digits of timer and stopwatch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Placed:
    bounds: Rect

    @property
    def center(self) -> tuple[int, int]:
        """The point to tap, 0..999."""
        return self.bounds.relative_center


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLine(_Placed):
    """One line of text. ``selected``: on a row selected by long press. ``sent``: in a message that was sent."""

    text: str
    role: TextRole
    selected: bool = False
    sent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Button(_Placed):
    """A filled button or a tab with a text on it. ``selected`` is true on the tab that is shown."""

    text: str
    selected: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Icon(_Placed):
    """An icon: ``name`` is its meaning (``back``, ``add``, ``delete``, ``more`` ...).

    ``label`` is the text under it (apps on the home screen), else empty.
    """

    name: str
    label: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch(_Placed):
    """An on/off switch with the text to its left."""

    label: str
    is_on: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Slider(_Placed):
    """A slider with the text above it. ``bounds`` are the track's, along which ``value`` runs from 0 to 1."""

    label: str
    value: float

    @property
    def left_end(self) -> tuple[int, int]:
        """The track's left end, 0..999."""
        return self._end(self.bounds.left)

    @property
    def right_end(self) -> tuple[int, int]:
        """The track's right end, 0..999."""
        return self._end(self.bounds.right - 1)

    def _end(self, x: int) -> tuple[int, int]:
        return Rect(left=x, right=x, top=self.bounds.top, bottom=self.bounds.bottom).relative_center


@dataclass(frozen=True, kw_only=True, slots=True)
class Field(_Placed):
    """A text field. ``label`` is the small text above its value; ``lines`` are the lines of the value as drawn.

    ``selected`` is true while the whole value is selected: typing replaces it.
    """

    label: str
    lines: tuple[str, ...]
    focused: bool = False
    selected: bool = False

    @property
    def text(self) -> str:
        """The lines joined by line feeds: a screenshot does not show which lines were only wrapped."""
        return "\n".join(self.lines)


_P = TypeVar("_P", bound=_Placed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadScreen:
    """Everything read from one screenshot, each tuple in reading order (top to bottom, left to right).

    ``title`` is the text of the title bar, in a dialog its heading; empty at home and in the camera. ``texts`` holds
    every line, those on buttons and in fields too, but not the letters of the keyboard. ``is_dialog`` is true when a
    dialog or menu covers the screen: then only what is in it can be tapped. ``is_home`` is true on the home screen.
    """

    title: str = ""
    texts: tuple[TextLine, ...] = ()
    buttons: tuple[Button, ...] = ()
    icons: tuple[Icon, ...] = ()
    switches: tuple[Switch, ...] = ()
    sliders: tuple[Slider, ...] = ()
    fields: tuple[Field, ...] = ()
    keyboard_visible: bool = False
    is_dialog: bool = False
    is_home: bool = False
    clock_text: str = ""
    wifi_shown: bool = False
    bluetooth_shown: bool = False

    def find_text(self, text: str, *roles: TextRole) -> TextLine | None:
        """Returns the first line with exactly this text, of one of the roles if given."""
        return _first(line for line in self.texts if line.text == text and (not roles or line.role in roles))

    def find_button(self, text: str) -> Button | None:
        """Returns the first button with exactly this text."""
        return _first(button for button in self.buttons if button.text == text)

    def find_icon(self, name: str) -> Icon | None:
        """Returns the first icon with this name."""
        return _first(icon for icon in self.icons if icon.name == name)

    def find_app(self, label: str) -> Icon | None:
        """Returns the icon of the app with this label on the home screen."""
        return _first(icon for icon in self.icons if icon.label == label)

    def find_switch(self, label: str) -> Switch | None:
        """Returns the switch with this text to its left."""
        return _first(switch for switch in self.switches if switch.label == label)

    def find_slider(self, label: str) -> Slider | None:
        """Returns the slider with this text above it."""
        return _first(slider for slider in self.sliders if slider.label == label)

    def find_field(self, label: str) -> Field | None:
        """Returns the field with this label."""
        return _first(field for field in self.fields if field.label == label)


def _first(matches: Iterable[_P]) -> _P | None:
    return next(iter(matches), None)
