"""The state of a device that Android would store: clock, settings, files, databases, preferences, clipboard."""

from __future__ import annotations

from rollout_buffer_lab.simulated_phone.device_state.clock import DeviceClock
from rollout_buffer_lab.simulated_phone.device_state.databases import (
    CALENDAR_DB,
    CONTACTS_DB,
    SCHEMAS,
    SMS_DB,
    Database,
)
from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileSystem

STORAGE = "/storage/emulated/0"
MARKOR_FOLDER = f"{STORAGE}/Documents/Markor"
PHOTO_FOLDER = f"{STORAGE}/Pictures"
VIDEO_FOLDER = f"{STORAGE}/Movies"
AUDIO_FOLDER = f"{STORAGE}/Android/data/com.dimowner.audiorecorder/files/Music/records"
_FOLDERS = (
    *(f"{STORAGE}/{name}" for name in ("Alarms", "Audiobooks", "Download", "Movies", "Music", "Notifications")),
    *(f"{STORAGE}/{name}" for name in ("Pictures", "Podcasts", "Recordings", "Ringtones")),
    MARKOR_FOLDER,
    f"{STORAGE}/DCIM",
    AUDIO_FOLDER,
)

_DEFAULT_SETTINGS = {
    "global": {
        "airplane_mode_on": "0",
        "auto_time": "0",
        "auto_time_zone": "0",
        "bluetooth_on": "1",
        "mobile_data": "1",
        "wifi_on": "1",
    },
    "secure": {"default_input_method": "com.google.android.inputmethod.latin", "nfc_on": "0", "ui_night_mode": "1"},
    "system": {
        "screen_brightness": "102",
        "screen_brightness_mode": "0",
        "time_12_24": "24",
        "volume_alarm": "6",
        "volume_music": "5",
        "volume_ring": "5",
    },
}


class Settings:
    """The three settings tables, text to text, as ``settings get`` and ``settings put`` see them."""

    def __init__(self) -> None:
        self._tables = {namespace: dict(values) for namespace, values in _DEFAULT_SETTINGS.items()}

    def get(self, namespace: str, key: str) -> str | None:
        """Returns the value; None if it was never set."""
        return self._tables[namespace].get(key)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Sets the value."""
        self._tables[namespace][key] = value

    def delete(self, namespace: str, key: str) -> bool:
        """Deletes the value; returns False if there was none."""
        return self._tables[namespace].pop(key, None) is not None

    def all(self, namespace: str) -> dict[str, str]:
        """Returns all values of a table."""
        return dict(self._tables[namespace])

    def is_on(self, namespace: str, key: str) -> bool:
        """Returns True unless the value is ``0``, empty or not set."""
        return self.get(namespace, key) not in (None, "", "0")

    def number(self, namespace: str, key: str) -> int:
        """Returns the value as an integer; 0 if it is none."""
        value = self.get(namespace, key) or ""
        return int(value) if value.removeprefix("-").isdecimal() else 0


class DeviceState:
    """One device, at first as after a factory reset.

    ``preferences`` are the apps' shared preferences by package; ``clipboard`` is the text that was copied last;
    ``focused_component`` is the activity in front.
    """

    def __init__(self) -> None:
        self.clock = DeviceClock()
        self.settings = Settings()
        self.files = FileSystem(self.clock)
        self.databases = {path: Database(path) for path in SCHEMAS}
        self.preferences: dict[str, dict[str, str]] = {}
        self.clipboard = ""
        self.focused_component = ""
        for path, database in self.databases.items():
            self.files.mount(path, database)
        for folder in _FOLDERS:
            self.files.make_folders(folder)

    @property
    def contacts_db(self) -> Database:
        """The contacts provider's database."""
        return self.databases[CONTACTS_DB]

    @property
    def sms_db(self) -> Database:
        """The telephony provider's database."""
        return self.databases[SMS_DB]

    @property
    def calendar_db(self) -> Database:
        """The calendar app's database."""
        return self.databases[CALENDAR_DB]

    def preferences_of(self, package: str) -> dict[str, str]:
        """Returns the app's preferences, to read and to write."""
        return self.preferences.setdefault(package, {})

    def close(self) -> None:
        """Closes the databases."""
        for database in self.databases.values():
            database.close()
