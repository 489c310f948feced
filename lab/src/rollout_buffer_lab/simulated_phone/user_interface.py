"""The phone's user interface: the app in front, touches, typing, the status bar and the keyboard.

Every action of an agent returns a note: empty, or one sentence that says why it could not be done. None raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollout_buffer_lab.simulated_phone.apps.calendar import CalendarApp
from rollout_buffer_lab.simulated_phone.apps.clipper_and_phone import ClipperApp, PhoneApp
from rollout_buffer_lab.simulated_phone.apps.clock import ClockApp
from rollout_buffer_lab.simulated_phone.apps.contacts import ContactsApp
from rollout_buffer_lab.simulated_phone.apps.dates import time_of_day
from rollout_buffer_lab.simulated_phone.apps.files import FilesApp
from rollout_buffer_lab.simulated_phone.apps.launcher import LauncherApp
from rollout_buffer_lab.simulated_phone.apps.markor import MarkorApp
from rollout_buffer_lab.simulated_phone.apps.media import AudioRecorderApp, CameraApp
from rollout_buffer_lab.simulated_phone.apps.messages import MessagesApp
from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.apps.settings import SettingsApp
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS, InstalledApp, app_named
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize
from rollout_buffer_lab.simulated_phone.keyboard import KEYBOARD_TOP, keyboard_widgets
from rollout_buffer_lab.simulated_phone.layout import STATUS_BAR_HEIGHT, ScreenBuilder
from rollout_buffer_lab.simulated_phone.palette import Surface
from rollout_buffer_lab.simulated_phone.widgets import Screen, Widget, WidgetKind
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import SystemButton

AppMaker = Callable[[InstalledApp, DeviceState], App]
_APP_CLASSES: dict[str, AppMaker] = {
    "Settings": SettingsApp,
    "Contacts": ContactsApp,
    "Simple SMS Messenger": MessagesApp,
    "Phone": PhoneApp,
    "Clock": ClockApp,
    "Markor": MarkorApp,
    "Files": FilesApp,
    "Camera": CameraApp,
    "Audio Recorder": AudioRecorderApp,
    "Simple Calendar Pro": CalendarApp,
    "Clipper": ClipperApp,
}
_LONG_PRESS_S = 0.4
_TOUCH_SLOP = 16  # pixels; a finger that moved less did not swipe
_END_OF_LIST = 1_000_000  # a scroll position that the builder reduces to the end of the list


class UserInterface:
    """The interface of one device, from the home screen on."""

    def __init__(self, state: DeviceState) -> None:
        self.state = state
        self._launcher = LauncherApp(state, self._launch)
        self._apps: dict[str, App] = {}
        self._shifted = False
        self._front: App = self._launcher
        self._bring_to_front(self._launcher)

    @property
    def _page(self) -> Page:
        return self._front.page

    @property
    def is_moving(self) -> bool:
        """True if the display changes without being touched."""
        return self._page.is_moving

    def screen(self) -> Screen:
        """Returns what the display shows now."""
        page = self._page
        has_keyboard = page.focused is not None
        builder = ScreenBuilder(host=page, scroll=page.scroll, bottom=KEYBOARD_TOP if has_keyboard else SCREEN_HEIGHT)
        page.build(builder)
        screen = builder.build()
        page.scroll = screen.scroll
        widgets = (*screen.widgets, *self._status_bar())
        if has_keyboard:
            widgets += keyboard_widgets(self._shifted, self._key_pressed, self._shift, self._erase, self._enter)
        return replace(screen, widgets=widgets)

    # Actions of an agent

    def tap(self, x: int, y: int) -> str:
        """Taps the widget at a point, or moves the slider there."""
        widget = self.screen().widget_at(x, y)
        if widget is None:
            return ""
        if widget.on_tap is not None:
            widget.on_tap()
        elif widget.on_slide is not None:
            widget.on_slide(_position_on(widget, x))
        return self._finish_action()

    def long_press(self, x: int, y: int, duration_s: float) -> str:
        """Presses long at a point; a press that is too short is a tap."""
        if duration_s < _LONG_PRESS_S:
            return self.tap(x, y)
        widget = self.screen().widget_at(x, y)
        if widget is None or widget.on_long_press is None:
            return "Nothing here reacts to a long press."
        widget.on_long_press()
        return self._finish_action()

    def swipe(self, x: int, y: int, end_x: int, end_y: int) -> str:
        """Drags the slider at the start of the swipe, or scrolls the list there."""
        if abs(end_x - x) < _TOUCH_SLOP and abs(end_y - y) < _TOUCH_SLOP:
            return self.tap(x, y)
        screen = self.screen()
        widget = screen.widget_at(x, y)
        if widget is not None and widget.on_slide is not None:
            widget.on_slide(_position_on(widget, end_x))
        elif screen.viewport is not None and screen.viewport.contains(x, y):
            self._scroll(end_x - x, end_y - y)
        return self._finish_action()

    def type_text(self, text: str) -> str:
        """Types into the field that has the focus."""
        page = self._page
        if not text:
            return "There was no text to type."
        if page.focused is None:
            return "No text field has the focus, so nothing was typed. Tap a field first."
        field = page.field_named(page.focused)
        complete = field.insert(text)
        self._show_end_of(page)
        return "" if complete else "The field is full; the end of the text was not typed."

    def press(self, button: SystemButton) -> str:
        """Presses a system button."""
        if button is SystemButton.HOME:
            self.go_home()
        elif button is SystemButton.BACK:
            self._back()
        elif button is SystemButton.ENTER:
            if self._page.focused is None:
                return "No text field has the focus, so Enter did nothing."
            self._enter()
        else:
            return "There is no menu here."
        return self._finish_action()

    def open_app(self, name: str) -> str:
        """Starts an installed app, or brings it to the front as it was left."""
        app = app_named(name)
        if app is None:
            installed = ", ".join(app.label for app in INSTALLED_APPS)
            return f"There is no app called {name[:60]!r}. Installed: {installed}."
        self._launch(app)
        return ""

    def go_home(self) -> None:
        """Shows the home screen; the app in front stays as it is, in the background."""
        del self._launcher.pages[1:]
        self._bring_to_front(self._launcher)

    # Actions of the system

    @property
    def front(self) -> InstalledApp:
        """The app in front; the launcher on the home screen."""
        return self._front.info

    @property
    def running(self) -> list[InstalledApp]:
        """The apps that were started and not closed, in the order of their first start; never the launcher."""
        return [app.info for app in self._apps.values() if app.pages]

    def launch(self, info: InstalledApp, make_app: AppMaker | None = None) -> App:
        """Starts the app, or brings it to the front as it was left, and returns it.

        ``make_app`` makes the app if it has no class in ``_APP_CLASSES``.
        """
        if info.label not in self._apps:
            self._apps[info.label] = (make_app or _APP_CLASSES[info.label])(info, self.state)
        del self._launcher.pages[1:]
        self._bring_to_front(self._apps[info.label])
        return self._apps[info.label]

    def close_app(self, package: str) -> None:
        """Ends the app, in front or not, without saving. An app that does not run is no error."""
        for label in [label for label, app in self._apps.items() if app.info.package == package]:
            app = self._apps.pop(label)
            in_front = app is self._front
            app.pages.clear()
            if in_front:
                self.go_home()

    def erase(self) -> None:
        """Presses the backspace key: deletes the last character of the field with the focus, or its selected text."""
        self._erase()

    def select_all(self) -> None:
        """Selects the whole text of the field with the focus."""
        if self._page.focused is not None:
            field = self._page.field_named(self._page.focused)
            field.selected = bool(field.text)

    # Parts of the actions

    def _launch(self, info: InstalledApp) -> None:
        self.launch(info)

    def _bring_to_front(self, app: App) -> None:
        if self._front is not app and self._front.pages:
            self._front.page.leave()
        app.start()
        self._front = app
        self._shifted = False
        self.state.focused_component = app.info.component

    def _finish_action(self) -> str:
        """Goes home if the action left the app's last page; returns an empty note."""
        if not self._front.pages:
            self.go_home()
        return ""

    def _scroll(self, dx: int, dy: int) -> None:
        if not self._page.swiped(dx, dy):
            self._page.scroll -= dy

    def _back(self) -> None:
        if self._page.focused is not None:
            self._page.focused = None
        else:
            self._page.back()

    def _enter(self) -> None:
        page = self._page
        if page.focused is None:
            return
        field = page.field_named(page.focused)
        if field.multi_line:
            field.insert("\n")
            self._show_end_of(page)
        else:
            page.enter()

    def _key_pressed(self, text: str) -> None:
        self.type_text(text)
        self._shifted = False

    def _erase(self) -> None:
        if self._page.focused is not None:
            self._page.field_named(self._page.focused).erase_last()

    def _shift(self) -> None:
        self._shifted = not self._shifted

    def _show_end_of(self, page: Page) -> None:
        if page.focused is not None and page.field_named(page.focused).multi_line:
            page.scroll = _END_OF_LIST

    def _status_bar(self) -> list[Widget]:
        bar = Rect(left=0, top=0, right=SCREEN_WIDTH, bottom=STATUS_BAR_HEIGHT)
        time_bounds = replace(bar, left=48, right=300)
        widgets = [
            Widget(kind=WidgetKind.FILL, bounds=bar, surface=Surface.STATUS_BAR),
            Widget(
                kind=WidgetKind.TEXT,
                bounds=time_bounds,
                text=time_of_day(self.state.clock.now),
                text_size=TextSize.SMALL,
            ),
        ]
        for icon, key, left in (("wifi", "wifi_on", 960), ("bluetooth", "bluetooth_on", 872)):
            if self.state.settings.is_on("global", key):
                bounds = Rect(left=left, top=8, right=left + 64, bottom=72)
                widgets.append(Widget(kind=WidgetKind.ICON, bounds=bounds, icon=icon))
        return widgets


def _position_on(slider: Widget, x: int) -> float:
    return min(1.0, max(0.0, (x - slider.bounds.left) / slider.bounds.width))
