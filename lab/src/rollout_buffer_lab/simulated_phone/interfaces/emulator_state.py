"""The phone behind adb and gRPC: the state and screens of one device, recent tasks, and listeners to broadcasts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.databases import CALENDAR_DB, CONTACTS_DB, SMS_DB, Database
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS, InstalledApp
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.interfaces.app_databases import APP_DATABASES, APP_FOLDERS, APPS_WITHOUT_SCREENS
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder
from rollout_buffer_lab.simulated_phone.user_interface import UserInterface

ACTION_S = 1.0
"""Device time that a touch or a key takes. The device's clock does not follow the host's."""

BroadcastListener = Callable[[str, dict[str, str]], None]
"""Gets a broadcast's action and its extras."""

_FORWARDER = "com.google.androidenv.accessibilityforwarder"
_PROVIDERS = {
    "com.android.providers.contacts": CONTACTS_DB,
    "com.android.providers.telephony": SMS_DB,
    "com.simplemobiletools.calendar.pro": CALENDAR_DB,
}


class EmulatorState:
    """One phone that stays switched on: all of its state outlives episodes. ``lock`` guards the other attributes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.state = DeviceState()
        for path, schema in APP_DATABASES.items():
            self.state.databases[path] = Database(path, schema)
            self.state.files.mount(path, self.state.databases[path])
        for folder in (*APP_FOLDERS, *(f"/data/data/{app.package}" for app in self.apps())):
            self.state.files.make_folders(folder)
        self.ui = UserInterface(self.state)
        self.installed_later = {_FORWARDER}
        self.listeners: list[BroadcastListener] = []
        self.never_idle = False
        self._task_ids: dict[str, int] = {}

    @staticmethod
    def apps() -> tuple[InstalledApp, ...]:
        """Returns all apps, those with screens first."""
        return (*INSTALLED_APPS, *APPS_WITHOUT_SCREENS)

    def app_of(self, package: str) -> InstalledApp | None:
        """Returns the installed app of this package; None if there is none."""
        return next((app for app in self.apps() if app.package == package), None)

    def packages(self) -> list[str]:
        """Returns the packages of apps and providers, and those that were installed over adb."""
        return sorted({app.package for app in self.apps()} | set(_PROVIDERS) | self.installed_later)

    def launch(self, info: InstalledApp) -> App:
        """Starts the app or brings it to the front."""
        make_app = AppWithoutScreens if info in APPS_WITHOUT_SCREENS else None
        return self.ui.launch(info, make_app)

    def force_stop(self, package: str) -> None:
        """Ends the app."""
        self.ui.close_app(package)

    def clear(self, package: str) -> bool:
        """Ends the app and forgets its data; False when there is no such package."""
        if package not in self.packages():
            return False
        self.force_stop(package)
        self.state.preferences.pop(package, None)
        for path, database in self.state.databases.items():
            if path == _PROVIDERS.get(package) or path.startswith(f"/data/data/{package}/"):
                database.wipe()
        return True

    def tasks(self) -> list[tuple[int, InstalledApp, bool]]:
        """Returns task id and app of each task, and whether it is in front; the front one first."""
        front = self.ui.front
        others = [app for app in self.ui.running if app is not front]
        return [(self._task_id(app), app, app is front) for app in (front, *others)]

    def remove_task(self, task_id: int) -> None:
        """Ends the app with this task, if there is one."""
        for known_id, app, _ in self.tasks():
            if known_id == task_id:
                self.force_stop(app.package)

    def broadcast(self, action: str, extras: dict[str, str]) -> None:
        """Calls all listeners."""
        for listener in self.listeners:
            listener(action, extras)

    def close(self) -> None:
        """Frees the databases."""
        self.state.close()

    def _task_id(self, app: InstalledApp) -> int:
        return self._task_ids.setdefault(app.package, 2 + len(self._task_ids))


class AppWithoutScreens(App):
    """An app of which there is nothing but its package and its files."""

    def first_page(self) -> Page:
        """Returns a page that says so."""
        return _NothingToSee(self)


class _NothingToSee(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar(self.app.info.label)
        screen.paragraph("This app has no screens on the simulated phone.")


def full_component(app: InstalledApp) -> str:
    """Returns ``package/activity`` with the activity's whole name, as Android prints it."""
    activity = app.package + app.activity if app.activity.startswith(".") else app.activity
    return f"{app.package}/{activity}"
