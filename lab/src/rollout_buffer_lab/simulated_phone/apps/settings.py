"""Settings: a list of pages, whose switches and sliders write the settings tables."""

from __future__ import annotations

from functools import partial

from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder

_BRIGHTNESS_RANGE = (1, 255)
_SNAP = 0.03  # share of the track at each end that counts as the end
_VOLUMES = (
    ("Media volume", "volume_music", 15),
    ("Ring volume", "volume_ring", 7),
    ("Alarm volume", "volume_alarm", 7),
)


class SettingsApp(App):
    """The system's settings."""

    def first_page(self) -> Page:
        """Returns the list of pages."""
        return _Root(self)


class _Root(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Settings")
        for title, secondary, make_page in _PAGES:
            screen.row(title, secondary=secondary, on_tap=partial(self.show, make_page, title))


class _SettingsPage(Page):
    """One page of the list: its title with a back arrow, then its rows."""

    def __init__(self, app: App, title: str) -> None:
        super().__init__(app)
        self._title = title

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar(self._title, on_back=self.back)
        self.add_rows(screen)

    def add_rows(self, screen: ScreenBuilder) -> None:
        """Adds the rows of the page."""

    def _switch(
        self, screen: ScreenBuilder, text: str, namespace: str, key: str, on: str = "1", off: str = "0"
    ) -> None:
        settings = self.state.settings
        is_on = settings.get(namespace, key) == on
        screen.switch_row(text, is_on, lambda: settings.put(namespace, key, off if is_on else on))


class _Network(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        self._switch(screen, "Wi-Fi", "global", "wifi_on")
        self._switch(screen, "Mobile data", "global", "mobile_data")
        self._switch(screen, "Airplane mode", "global", "airplane_mode_on")
        if self.state.settings.is_on("global", "wifi_on"):
            screen.section("Networks")
            screen.row("AndroidWifi", secondary="Connected")


class _Devices(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        self._switch(screen, "Bluetooth", "global", "bluetooth_on")
        self._switch(screen, "NFC", "secure", "nfc_on")


class _Apps(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        for app in sorted(INSTALLED_APPS, key=lambda app: app.label):
            screen.row(app.label, secondary=app.package)


class _Display(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        low, high = _BRIGHTNESS_RANGE
        brightness = self.state.settings.number("system", "screen_brightness")
        screen.slider_row("Brightness level", (brightness - low) / (high - low), self._set_brightness)
        self._switch(screen, "Adaptive brightness", "system", "screen_brightness_mode")
        self._switch(screen, "Dark theme", "secure", "ui_night_mode", on="2", off="1")

    def _set_brightness(self, position: float) -> None:
        low, high = _BRIGHTNESS_RANGE
        self.state.settings.put("system", "screen_brightness", str(round(low + (high - low) * _snapped(position))))


class _Sound(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        for text, key, highest in _VOLUMES:
            value = self.state.settings.number("system", key) / highest
            screen.slider_row(text, value, partial(self._set, key, highest))

    def _set(self, key: str, highest: int, position: float) -> None:
        self.state.settings.put("system", key, str(round(highest * _snapped(position))))


class _About(_SettingsPage):
    def add_rows(self, screen: ScreenBuilder) -> None:
        screen.row("Device name", secondary="Simulated phone")
        screen.row("Android version", secondary="13 (simulated)")


class _ReadOnly(_SettingsPage):
    """A page with nothing to set."""

    def __init__(self, app: App, title: str, *, rows: tuple[tuple[str, str], ...]) -> None:
        super().__init__(app, title)
        self._rows = rows

    def add_rows(self, screen: ScreenBuilder) -> None:
        for text, secondary in self._rows:
            screen.row(text, secondary=secondary)


_PAGES = (
    ("Network & internet", "Wi-Fi, mobile, airplane mode", _Network),
    ("Connected devices", "Bluetooth, pairing", _Devices),
    ("Apps", "Installed apps", _Apps),
    ("Notifications", "History, conversations", partial(_ReadOnly, rows=(("History", "Off"),))),
    ("Battery", "100%", partial(_ReadOnly, rows=(("Battery level", "100%"), ("Battery saver", "Off")))),
    ("Storage", "12% used", partial(_ReadOnly, rows=(("Used", "3.8 GB"), ("Free", "28.2 GB")))),
    ("Sound & vibration", "Volume, haptics", _Sound),
    ("Display", "Brightness level, dark theme", _Display),
    ("Wallpaper & style", "Home screen", partial(_ReadOnly, rows=(("Wallpaper", "Night"),))),
    ("Security", "Screen lock", partial(_ReadOnly, rows=(("Screen lock", "None"),))),
    ("Location", "Off", partial(_ReadOnly, rows=(("Use location", "Off"),))),
    ("System", "Languages, time", partial(_ReadOnly, rows=(("Language", "English"), ("Time zone", "UTC")))),
    ("About phone", "Simulated phone", _About),
)


def _snapped(position: float) -> float:
    if position < _SNAP:
        return 0.0
    return 1.0 if position > 1 - _SNAP else position
