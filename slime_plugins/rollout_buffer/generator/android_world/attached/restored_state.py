"""The state of an attached device that a restore must bring back, as one digest for each part.

The first restore of a device records its state in a file; later ones must bring the same state back. Deleting the file
accepts the device's present state.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.errors import DeviceError

MAX_CLOCK_DRIFT_S = 120.0
UNREADABLE = "unreadable"
# Settings that change by themselves.
_VOLATILE = "rollout_buffer|boot_count|last_|_time=|timestamp|count=|usage|low_battery|next_alarm"


class StatePart(StrEnum):
    """A part of a device's state that an episode may change."""

    APPS = "apps"  # the files in the data folders of the task's apps; only root can read them
    STORAGE = "storage"  # the files in the shared storage
    SETTINGS = "settings"  # the system's settings, except those that change by themselves
    CLOCK = "clock"  # the difference to this host's clock
    ACCOUNTS = "accounts"  # the accounts of the device


_FILES = "find {} -type f -exec sha1sum {{}} + 2>&1 | sort | sha1sum"
_COMMANDS = {
    StatePart.STORAGE: _FILES.format("/sdcard/"),
    StatePart.SETTINGS: "for table in system secure global; do settings list $table; done"
    f" | grep -vE '{_VOLATILE}' | sort | sha1sum",
    StatePart.CLOCK: "date +%s",
    StatePart.ACCOUNTS: "dumpsys account | grep -F 'Account {' | sort -u | sha1sum",
}


def script(parts: Collection[StatePart], packages: Collection[str]) -> str:
    """Returns a script for the device's shell that prints a line for each part, and for each app: name and digest."""
    lines = [f"echo {part} $({_COMMANDS[part]})" for part in sorted(parts) if part in _COMMANDS]
    if StatePart.APPS in parts:
        for package in sorted(packages):
            folder = shlex.quote(f"/data/data/{package}")
            digest = f"if ls {folder} >/dev/null 2>&1; then {_FILES.format(folder)}; else echo {UNREADABLE}; fi"
            lines.append(f"echo {StatePart.APPS}:{package} $({digest})")
    return "; ".join(lines)


def read(output: str) -> dict[str, str]:
    """Returns what the script printed: digests by part; the clock as its difference to this host's."""
    state = {words[0]: words[1] for line in output.splitlines() if len(words := line.split()) > 1}
    if StatePart.CLOCK in state:
        state[StatePart.CLOCK] = str(float(state[StatePart.CLOCK]) - time.time())
    return state


def changed(recorded: Mapping[str, str], state: Mapping[str, str]) -> list[str]:
    """Returns the parts whose state differs from the recorded one."""
    return sorted(part for part in state if part in recorded and not _is_same(part, recorded[part], state[part]))


def _is_same(part: str, recorded: str, found: str) -> bool:
    if part == StatePart.CLOCK:
        return abs(float(recorded) - float(found)) <= MAX_CLOCK_DRIFT_S
    return recorded == found


def recorded_in(file: Path) -> dict[str, str]:
    """Returns the recorded state, {} before the first restore."""
    try:
        state: dict[str, str] = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return state


def record(file: Path, state: Mapping[str, str]) -> None:
    """Adds what is not recorded yet."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({**state, **recorded_in(file)}))
    partial.replace(file)


def not_restored(name: str, parts: Collection[str], file: Path) -> DeviceError:
    """Returns the error of a device whose state a repeated restore did not bring back."""
    return DeviceError(
        f"{name} is not restored: {', '.join(parts)} differ from the state after its first restore, also after a "
        f"second try; restore it by hand, or delete {file} to accept its present state",
        {"fault": NOT_RESTORED},
    )
