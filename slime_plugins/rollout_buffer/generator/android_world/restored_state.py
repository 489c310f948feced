"""The state of a device that must be the same before every episode: what adb's shell says of it, part by part.

A device's state is recorded in a file before its first episode; deleting the file accepts the device's present state.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer

SNAPSHOTS = "/data/data/android_world/snapshots"
"""Folder on the device with android_world's snapshots of its apps' data."""
MAX_CLOCK_DRIFT_S = 120.0
_READ_S = 60.0
_MAX_NAMES = 3
# Settings that change by themselves, and those that android_world sets for every task.
_VOLATILE = re.compile(
    "rollout_buffer|boot_count|last_|_time=|timestamp|count=|usage|low_battery|next_alarm"
    "|^auto_time|^time_12_24|^show_touches|^pointer_location|^policy_control"
)
_OF_APPS = " /sdcard/Android/"
"""Folder of the shared storage in which apps, also those that run unasked, keep files of their own."""

State = dict[str, list[str]]
"""Lines by part; each app is a part: ``apps:org.example.notes``."""


class StatePart(StrEnum):
    """A part of a device's state that an episode may change."""

    APPS = "apps"  # the files in the data folders of the task's apps; only root can read them
    STORAGE = "storage"  # the files in the shared storage
    SETTINGS = "settings"  # the system's settings, except those that change by themselves
    CLOCK = "clock"  # the difference to this host's clock
    ACCOUNTS = "accounts"  # the accounts of the device


COUNTED = frozenset(StatePart) - {StatePart.CLOCK}
"""Parts that every device compares; android_world sets the clock before each task."""
_FILES = "find {} -type f -exec sha1sum {{}} +"
_COMMANDS = {
    StatePart.STORAGE: _FILES.format("/sdcard/"),
    StatePart.SETTINGS: "settings list system; settings list secure; settings list global",
    StatePart.CLOCK: "date +%s",
    StatePart.ACCOUNTS: "dumpsys account",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCheck:
    """How a device's state is compared after each restore.

    ``file`` holds the recorded state. An episode is refused if a part in ``required`` differs, also after a second
    restore; then ``give_up`` is called. Other parts are counted. With ``snapshots``, the folder on the device with
    android_world's snapshots of its apps, the data of an app must be that of its snapshot.
    """

    file: Path
    required: frozenset[StatePart] = frozenset()
    snapshots: str = ""
    give_up: Callable[[], None] = lambda: None

    def compare(self, adb: AdbServer, serial: str, packages: Collection[str]) -> dict[str, str]:
        """Returns what differs from the recorded state, by part; records what is not recorded yet.

        Raises:
            DeviceError: the state cannot be read.
        """
        _, output = adb.run("-s", serial, "shell", self.script(packages), timeout_s=_READ_S)
        if "@end" not in map(str.strip, output.splitlines()):
            raise DeviceError(f"the state of {serial} cannot be read: {output[-400:]}")
        found = read(output)
        recorded = self._recorded()
        known = recorded | {name.replace("snapshot:", "apps:"): found.pop(name) for name in _snapshots_in(found)}
        changed = differences(known, found)
        if not self.required.intersection(map(part_of, changed)):
            partial = self.file.with_suffix(".partial")
            partial.write_text(json.dumps(found | recorded))
            partial.replace(self.file)
        return changed

    def script(self, packages: Collection[str]) -> str:
        """Returns a script for the device's shell that prints each part after a line with its name."""
        parts = sorted(COUNTED | self.required)
        lines = [f"echo @{part}; {_COMMANDS[part]}" for part in parts if part in _COMMANDS]
        folders = {"apps": "/data/data"} | ({"snapshot": self.snapshots} if self.snapshots else {})
        for package in sorted(map(shlex.quote, packages)):
            needed = f"{[*folders.values()][-1]}/{package}"
            found = [
                f"echo @{name}:{package}; {_FILES.format(f'{folder}/{package}')}" for name, folder in folders.items()
            ]
            lines.append(f"if [ -d {needed} ] && ls {needed} >/dev/null 2>&1; then {'; '.join(found)}; fi")
        return "; ".join([*lines, "echo @end"])

    def _recorded(self) -> State:
        try:
            state: State = json.loads(self.file.read_text())
        except FileNotFoundError:
            return {}
        return state


def read(output: str) -> State:
    """Returns what the script printed; the clock as its difference to this host's."""
    state: State = {}
    lines: list[str] = []
    for line in map(str.strip, output.splitlines()):
        if line.startswith("@"):
            lines = state[line[1:]] = []
        else:
            lines.append(line)
    del state["end"]
    for name, lines in state.items():
        state[name] = sorted(filter(None, _meant(name, lines)))
    return state


def differences(recorded: Mapping[str, Collection[str]], found: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Returns the parts that differ, each with the first lines of the difference."""
    changed = {}
    for name in sorted(found.keys() & recorded.keys()):
        lines = sorted(set(recorded[name]) ^ set(found[name]))
        if name == StatePart.CLOCK and abs(sum(map(float, recorded[name])) - sum(map(float, found[name]))) <= (
            MAX_CLOCK_DRIFT_S
        ):
            continue
        if lines:
            changed[name] = ", ".join(lines[:_MAX_NAMES] + ["…"] * (len(lines) > _MAX_NAMES))
    return changed


def part_of(name: str) -> str:
    """Returns the part to which a name in a state belongs."""
    return name.partition(":")[0]


def not_restored(name: str, changed: Mapping[str, str], file: Path) -> DeviceError:
    """Returns the error of a device whose state a repeated restore did not bring back."""
    parts = "; ".join(f"{part} ({lines})" for part, lines in changed.items())
    return DeviceError(
        f"{name} is not restored, also not by a second try: its state differs in {parts}; restore it by hand, or "
        f"delete {file} to accept its present state",
        {"fault": NOT_RESTORED},
    )


def _snapshots_in(state: State) -> list[str]:
    return [name for name in state if part_of(name) == "snapshot"]


def _meant(name: str, lines: Iterable[str]) -> Iterable[str]:
    """Returns the lines of a part without what changes by itself and without the folder of an app."""
    part, _, package = name.partition(":")
    if part == StatePart.SETTINGS:
        return (line for line in lines if not _VOLATILE.search(line))
    if part == StatePart.ACCOUNTS:
        return (line for line in lines if line.startswith("Account {"))
    if part == StatePart.CLOCK:
        return (str(float(line) - time.time()) for line in lines if line.isdecimal())
    if part == StatePart.STORAGE:
        return (line for line in lines if _OF_APPS not in line)
    return (re.sub(rf" /\S*?/{re.escape(package)}/", " ", line) for line in lines)
