"""Base classes of apps: an app is a stack of pages, each with its fields and its scroll position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollout_buffer_lab.simulated_phone.device_state.packages import InstalledApp
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.fields import TextField
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder
from rollout_buffer_lab.simulated_phone.widgets import Handler


class App(ABC):
    """One running app: a stack of pages over the device's state. Without pages it is closed."""

    def __init__(self, info: InstalledApp, state: DeviceState) -> None:
        self.info = info
        self.state = state
        self.pages: list[Page] = []

    @property
    def preferences(self) -> dict[str, str]:
        """The app's shared preferences on the device."""
        return self.state.preferences_of(self.info.package)

    @property
    def page(self) -> Page:
        """The page on top."""
        return self.pages[-1]

    @abstractmethod
    def first_page(self) -> Page:
        """Returns the page that the app shows when it is started."""

    def start(self) -> None:
        """Comes to the front with the pages as they were left, or with the first page."""
        if not self.pages:
            self.pages.append(self.first_page())

    def push(self, page: Page) -> None:
        """Shows a page above the present one."""
        self.page.focused = None
        self.pages.append(page)

    def pop(self) -> None:
        """Leaves the page on top."""
        self.pages.pop().leave()

    def replace(self, page: Page) -> None:
        """Shows a page instead of the present one."""
        self.pop()
        self.pages.append(page)


class Page(ABC):
    """One page. ``focused`` is the key of the field with the focus, None without one, which hides the keyboard."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.state = app.state
        self.scroll = 0
        self.fields: dict[str, TextField] = {}
        self.focused: str | None = None

    @abstractmethod
    def build(self, screen: ScreenBuilder) -> None:
        """Lays the page out from the device's state; called for every observation."""

    @property
    def is_moving(self) -> bool:
        """True if the page changes without being touched, as a running stopwatch does."""
        return False

    def enter(self) -> None:
        """Handles the Enter key in a field that is not ``multi_line``."""
        self.focused = None

    def back(self) -> None:
        """Handles the Back button."""
        self.app.pop()

    def swiped(self, dx: int, dy: int) -> bool:
        """Handles a swipe; returns False if the page shall scroll."""
        return False

    def leave(self) -> None:
        """Takes the focus away. Called when the page is closed, or when its app goes to the background."""
        self.focused = None

    def show(self, make_page: Callable[..., Page], *arguments: Any) -> None:
        """Opens ``make_page(app, *arguments)`` above this page."""
        self.app.push(make_page(self.app, *arguments))

    def field_named(self, key: str) -> TextField:
        """Returns the field with this key; a new, empty one at the first call."""
        return self.fields.setdefault(key, TextField())

    def focus(self, key: str) -> None:
        """Gives the field the focus; selected text is no longer selected."""
        self.focused = key
        for field in self.fields.values():
            field.selected = False

    def open_field_menu(self, key: str) -> None:
        """Opens the menu of actions on the field's text."""
        self.focus(key)
        field = self.field_named(key)
        self.app.pages.append(
            MenuDialog(
                self.app,
                "Edit text",
                [
                    ("Select all", lambda: self._select(field)),
                    ("Copy", lambda: self._copy(field)),
                    ("Paste", lambda: self._paste(field)),
                    ("Clear", field.clear),
                ],
            )
        )

    def _select(self, field: TextField) -> None:
        field.selected = bool(field.text)

    def _copy(self, field: TextField) -> None:
        self.state.clipboard = field.text

    def _paste(self, field: TextField) -> None:
        field.insert(self.state.clipboard)


class MenuDialog(Page):
    """A list of choices. A tap on a choice closes the dialog, then calls its handler."""

    def __init__(self, app: App, title: str, choices: Sequence[tuple[str, Handler]]) -> None:
        super().__init__(app)
        self._title = title
        self._choices = tuple(choices)

    def build(self, screen: ScreenBuilder) -> None:
        """Adds the title, then a row for each choice."""
        screen.dialog(self._title)
        for text, handler in self._choices:
            screen.row(text, on_tap=partial(self._choose, handler))

    def _choose(self, handler: Handler) -> None:
        self.app.pop()
        handler()


class ConfirmDialog(Page):
    """A question with Cancel and one other button."""

    def __init__(self, app: App, title: str, question: str, button: str, on_confirm: Handler) -> None:
        super().__init__(app)
        self._title, self._question, self._button = title, question, button
        self._on_confirm = on_confirm

    def build(self, screen: ScreenBuilder) -> None:
        """Adds the title, the question and two buttons."""
        screen.dialog(self._title)
        screen.paragraph(self._question[:400])
        screen.button_row([("Cancel", self.back), (self._button, self._confirm)])

    def _confirm(self) -> None:
        self.app.pop()
        self._on_confirm()
