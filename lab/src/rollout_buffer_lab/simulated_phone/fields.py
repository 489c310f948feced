"""Text fields, and the interface of a page that has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MAX_FIELD_CHARACTERS = 20_000


@dataclass(kw_only=True, slots=True)
class TextField:
    """The text of one field; the cursor is always at its end. ``selected`` is True if all of it is selected.

    ``on_change`` is called after every change. A field that is not ``multi_line`` turns line feeds into blanks.
    """

    text: str = ""
    multi_line: bool = False
    selected: bool = False
    on_change: Callable[[str], None] | None = None

    def insert(self, text: str) -> bool:
        """Appends text, or replaces selected text; returns False if it was cut at ``MAX_FIELD_CHARACTERS``."""
        wanted = ("" if self.selected else self.text) + self._acceptable(text)
        self._replace(wanted[:MAX_FIELD_CHARACTERS])
        return len(wanted) <= MAX_FIELD_CHARACTERS

    def erase_last(self) -> None:
        """Deletes the last character, or the whole text if it is selected."""
        self._replace("" if self.selected else self.text[:-1])

    def clear(self) -> None:
        """Empties the field."""
        self._replace("")

    def _acceptable(self, text: str) -> str:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text if self.multi_line else text.replace("\n", " ")

    def _replace(self, text: str) -> None:
        self.text = text
        self.selected = False
        if self.on_change is not None:
            self.on_change(text)


class FieldHost(Protocol):
    """A page with fields, one of which has the focus."""

    focused: str | None

    def field_named(self, key: str) -> TextField:
        """Returns the field with this key."""
        ...

    def focus(self, key: str) -> None:
        """Focuses the field and shows the keyboard."""
        ...

    def open_field_menu(self, key: str) -> None:
        """Opens the field's menu: select, copy, paste, clear."""
        ...
