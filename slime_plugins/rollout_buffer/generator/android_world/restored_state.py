"""The state of a device that must be the same before every episode, read and written through adb's shell.

A device's state is recorded in a file before its first episode; deleting the file accepts the device's present state.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer

SNAPSHOTS = "/data/data/android_world/snapshots"
"""Folder on the device with android_world's snapshots of its apps' data."""
MAX_CLOCK_DRIFT_S = 120.0
_SCRIPT_TIMEOUT_S = 60.0
_MAX_NAMES = 3
_MAX_ADB_OUTPUT = 200
# Settings that change by themselves, and those that android_world sets for every task.
_VOLATILE = re.compile(
    "rollout_buffer|boot_count|last_|_time=|timestamp|count=|usage|low_battery|next_alarm"
    "|^auto_time|^time_12_24|^show_touches|^pointer_location|^policy_control"
)
_FOLDER_OF_APPS = " /sdcard/Android/"
"""Folder of the shared storage in which apps, also those that no task uses, have files of their own."""

_SWITCH = {"0": "disable", "1": "enable", "2": "enable"}
# Settings that show what a service of Android does: the command to the service, and its words by value.
_SERVICES = {
    "airplane_mode_on": ("cmd connectivity airplane-mode", _SWITCH),
    "wifi_on": ("svc wifi", _SWITCH),
    "bluetooth_on": ("svc bluetooth", _SWITCH),
    "mobile_data": ("svc data", _SWITCH),
    "zen_mode": ("cmd notification set_dnd", {"0": "off", "1": "priority", "2": "none", "3": "alarms"}),
    "ui_night_mode": ("cmd uimode night", {"0": "auto", "1": "no", "2": "yes"}),
}
_STREAMS = ("voice", "system", "ring", "music", "alarm", "notification")
_VOLUME = f"volume_({'|'.join(_STREAMS)})(_speaker)?"
_KEY = re.compile(r"[\w.:/-]+")
# If these were written, adb would lose the device, or Android would be set up again.
_NEVER_WRITTEN = re.compile("^adb_|^development_settings|^device_provisioned|^user_setup_complete|^android_id")
_PAUSES_S = (0.0, 0.5, 1.0)
"""Pauses between writing settings and reading them, one for each try: services answer before they have switched."""

State = dict[str, list[str]]
"""Lines by part; an app and a table of settings are parts: ``apps:org.example.notes``, ``settings:system``."""


class StatePart(StrEnum):
    """A part of a device's state that an episode may change."""

    APPS = "apps"  # the files in the data folders of the task's apps; only root can read them
    STORAGE = "storage"  # the files in the shared storage
    SETTINGS = "settings"  # the tables of the system's settings, except those that change by themselves
    CLOCK = "clock"  # the difference to this host's clock
    ACCOUNTS = "accounts"  # the accounts of the device


ALWAYS_COMPARED = frozenset(StatePart) - {StatePart.CLOCK}
"""Parts that are compared on every device: all but the clock, which android_world sets before each task."""
_FILES = "find {} -type f -exec sha1sum {{}} +"
_WRITABLE = frozenset({StatePart.SETTINGS, StatePart.CLOCK})
_COMMANDS = {
    "accounts": "dumpsys account",
    "clock": "date +%s",
    "settings:global": "settings list global",
    "settings:secure": "settings list secure",
    "settings:system": "settings list system",
    "storage": _FILES.format("/sdcard/"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCheck:
    """How a device's state is compared after each restore.

    ``file`` holds the recorded state. An episode is refused if a part in ``required`` differs even after a second
    restore; then ``give_up`` is called. Differences in other parts are only counted. With ``snapshots``, the folder on
    the device with android_world's snapshots of its apps, the data of an app must be that of its snapshot.
    """

    file: Path
    required: frozenset[StatePart] = frozenset()
    snapshots: str = ""
    give_up: Callable[[], None] = lambda: None

    def compare(self, adb: AdbServer, serial: str, packages: Collection[str]) -> dict[str, str]:
        """Returns what differs from the recorded state, by part.

        Records what is not recorded yet, unless a required part differs that cannot be put back.

        Raises:
            DeviceError: the state cannot be read.
        """
        present = _read_state(adb, serial, self.script(packages))
        recorded = self._recorded()
        snapshots = [name for name in present if part_of(name) == "snapshot"]
        # The files of an app's snapshot count as the recorded files of the app.
        expected = recorded | {name.replace("snapshot:", "apps:"): present.pop(name) for name in snapshots}
        changed = differences(expected, present)
        if not (self.required - _WRITABLE).intersection(map(part_of, changed)):
            unfinished = self.file.with_suffix(".partial")
            unfinished.write_text(json.dumps(present | recorded))
            unfinished.replace(self.file)
        return changed

    def put_back(self, adb: AdbServer, serial: str, changed: Mapping[str, str], *, sets_clock: bool) -> dict[str, str]:
        """Writes the recorded settings and the time to the device; returns the parts of ``changed`` that still differ.

        Raises:
            DeviceError: the state cannot be read.
        """
        recorded = {name: self._recorded()[name] for name in changed if part_of(name) in _WRITABLE}
        if not recorded:
            return dict(changed)
        adb_output, present = "", _read_state(adb, serial, _script(recorded))
        refused = "" if sets_clock or StatePart.CLOCK not in recorded else "its clock must not be set, or only by root"
        for pause_s in _PAUSES_S:
            writable = [name for name in recorded if sets_clock or name != StatePart.CLOCK]
            commands = [command for name in writable for command in _commands(name, recorded[name], present[name])]
            if not commands:
                break
            _, adb_output = adb.run("-s", serial, "shell", "; ".join(commands), timeout_s=_SCRIPT_TIMEOUT_S)
            time.sleep(pause_s)
            present = _read_state(adb, serial, _script(recorded))
            if not differences(recorded, present):
                break
        remaining = differences(recorded, present)
        reason = f" (not put back: {adb_output[-_MAX_ADB_OUTPUT:] or refused or 'adb printed nothing'})"
        others = {name: text for name, text in changed.items() if name not in recorded}
        return others | {name: text + reason for name, text in remaining.items()}

    def script(self, packages: Collection[str]) -> str:
        """Returns a script for the device's shell that prints each part after a line with its name."""
        lines = []
        folders = {"apps": "/data/data"} | ({"snapshot": self.snapshots} if self.snapshots else {})
        for package in sorted(map(shlex.quote, packages)):
            # With snapshots, an app is compared with its own snapshot, and an app without a snapshot is left out.
            app_folder = f"{self.snapshots or folders['apps']}/{package}"
            commands = [
                f"echo @{name}:{package}; {_FILES.format(f'{folder}/{package}')}" for name, folder in folders.items()
            ]
            lines.append(f"if [ -d {app_folder} ] && ls {app_folder} >/dev/null 2>&1; then {'; '.join(commands)}; fi")
        return _script([name for name in _COMMANDS if part_of(name) in ALWAYS_COMPARED | self.required], *lines)

    def _recorded(self) -> State:
        try:
            state: State = json.loads(self.file.read_text())
        except FileNotFoundError:
            return {}
        return state


def _script(names: Iterable[str], *more: str) -> str:
    return "; ".join([*(f"echo @{name}; {_COMMANDS[name]}" for name in names), *more, "echo @end"])


def _read_state(adb: AdbServer, serial: str, script: str) -> State:
    _, output = adb.run("-s", serial, "shell", script, timeout_s=_SCRIPT_TIMEOUT_S)
    if "@end" not in map(str.strip, output.splitlines()):
        raise DeviceError(f"the state of {serial} cannot be read: {output[-400:]}")
    return read(output)


def read(output: str) -> State:
    """Returns the state that the script printed, with the clock as its difference to this host's."""
    state: State = {}
    lines: list[str] = []
    for line in map(str.strip, output.splitlines()):
        if line.startswith("@"):
            lines = state[line[1:]] = []
        else:
            lines.append(line)
    del state["end"]
    for name, lines in state.items():
        state[name] = sorted(filter(None, _comparable_lines(name, lines)))
    return state


def differences(recorded: Mapping[str, Collection[str]], present: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Returns the parts in both states that differ, each with the first lines of the difference."""
    changed = {}
    for name in sorted(present.keys() & recorded.keys()):
        lines = sorted(set(recorded[name]) ^ set(present[name]))
        if name == StatePart.CLOCK:
            drift_s = sum(map(float, recorded[name])) - sum(map(float, present[name]))
            if abs(drift_s) <= MAX_CLOCK_DRIFT_S:
                continue
        if lines:
            changed[name] = ", ".join(lines[:_MAX_NAMES] + ["…"] * (len(lines) > _MAX_NAMES))
    return changed


def _commands(name: str, recorded: Iterable[str], present: Iterable[str]) -> Iterator[str]:
    """Yields the shell's commands that set the clock or a table of settings as recorded; they print only errors."""
    if name == StatePart.CLOCK:
        stamp = datetime.fromtimestamp(time.time() + sum(map(float, recorded)), UTC).strftime("%m%d%H%M%y.%S")
        yield f"date -u {stamp} >/dev/null || su 0 date -u {stamp} >/dev/null"
        return
    if any("=" not in line for line in (*recorded, *present)):
        return  # a value has several lines: it is not known which setting a line belongs to
    wanted, values = (dict(line.split("=", 1) for line in lines) for lines in (recorded, present))
    # Airplane mode first, because it switches other services.
    for key in sorted(wanted.keys() | values.keys(), key=lambda key: (key != "airplane_mode_on", key)):
        if wanted.get(key) != values.get(key) and _KEY.fullmatch(key) and not _NEVER_WRITTEN.search(key):
            yield f"{_setting_command(name.partition(':')[2], key, wanted.get(key))} >/dev/null"


def _setting_command(table: str, key: str, value: str | None) -> str:
    command, words = _SERVICES.get(key, ("", {}))
    if value in words:
        return f"{command} {words[value]}"
    if value is not None and (stream := re.fullmatch(_VOLUME, key)):
        return f"cmd media_session volume --stream {_STREAMS.index(stream[1])} --set {shlex.quote(value)}"
    return f"settings delete {table} {key}" if value is None else f"settings put {table} {key} {shlex.quote(value)}"


def part_of(name: str) -> str:
    """Returns the part to which a name in a state belongs."""
    return name.partition(":")[0]


def not_restored(name: str, changed: Mapping[str, str], file: Path) -> DeviceError:
    """Returns the error of a device whose state a repeated restore did not bring back."""
    parts = "; ".join(f"{part} ({lines})" for part, lines in changed.items())
    return DeviceError(
        f"{name} was not restored, not even by a second try: its state differs in {parts}; restore it by hand, or "
        f"delete {file} to accept its present state",
        {"fault": NOT_RESTORED},
    )


def _comparable_lines(name: str, lines: Iterable[str]) -> Iterable[str]:
    """Returns the lines of a part, without settings that change by themselves and without an app's folder in paths."""
    part, _, package = name.partition(":")
    if part == StatePart.SETTINGS:
        return (line for line in lines if not _VOLATILE.search(line) and not line.endswith("=null"))
    if part == StatePart.ACCOUNTS:
        return (line for line in lines if line.startswith("Account {"))
    if part == StatePart.CLOCK:
        return (str(float(line) - time.time()) for line in lines if line.isdecimal())
    if part == StatePart.STORAGE:
        return (line for line in lines if _FOLDER_OF_APPS not in line)
    return (re.sub(rf" /\S*?/{re.escape(package)}/", " ", line) for line in lines)
