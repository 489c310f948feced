"""The installed apps, with package names and activities as on AndroidWorld's device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledApp:
    """One app. ``aliases`` are other names by which it can be opened, in lower case."""

    label: str
    package: str
    activity: str
    icon: str
    aliases: tuple[str, ...] = ()

    @property
    def component(self) -> str:
        """``package/activity``, as ``am`` and ``dumpsys`` print it."""
        return f"{self.package}/{self.activity}"


INSTALLED_APPS: tuple[InstalledApp, ...] = (
    InstalledApp(
        label="Settings",
        package="com.android.settings",
        activity=".Settings",
        icon="settings",
        aliases=("system settings",),
    ),
    InstalledApp(
        label="Contacts",
        package="com.google.android.contacts",
        activity="com.android.contacts.activities.PeopleActivity",
        icon="person",
    ),
    InstalledApp(
        label="Simple SMS Messenger",
        package="com.simplemobiletools.smsmessenger",
        activity=".activities.MainActivity",
        icon="messages",
        aliases=("messages", "sms messenger", "simple sms", "sms"),
    ),
    InstalledApp(
        label="Phone",
        package="com.google.android.dialer",
        activity="com.google.android.dialer.extensions.GoogleDialtactsActivity",
        icon="phone",
        aliases=("dialer",),
    ),
    InstalledApp(
        label="Clock",
        package="com.google.android.deskclock",
        activity="com.android.deskclock.DeskClock",
        icon="clock",
    ),
    InstalledApp(
        label="Markor",
        package="net.gsantner.markor",
        activity=".activity.MainActivity",
        icon="note",
        aliases=("notes",),
    ),
    InstalledApp(
        label="Files",
        package="com.google.android.documentsui",
        activity="com.android.documentsui.files.FilesActivity",
        icon="folder",
        aliases=("file manager",),
    ),
    InstalledApp(
        label="Camera",
        package="com.android.camera2",
        activity="com.android.camera.CameraLauncher",
        icon="camera",
    ),
    InstalledApp(
        label="Audio Recorder",
        package="com.dimowner.audiorecorder",
        activity=".app.welcome.WelcomeActivity",
        icon="microphone",
    ),
    InstalledApp(
        label="Simple Calendar Pro",
        package="com.simplemobiletools.calendar.pro",
        activity=".activities.MainActivity",
        icon="calendar",
        aliases=("calendar", "simple calendar"),
    ),
    InstalledApp(
        label="Clipper",
        package="ca.zgrs.clipper",
        activity=".Main",
        icon="clipboard",
    ),
)


def app_named(name: str) -> InstalledApp | None:
    """Returns the app with exactly this label, package or alias, in any case; None if there is none."""
    wanted = " ".join(name.lower().split())
    for app in INSTALLED_APPS:
        if wanted in (app.label.lower(), app.package, *app.aliases):
            return app
    return None
