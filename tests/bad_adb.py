"""An ``adb`` program that behaves as the real one does with devices that misbehave. For tests of attached devices.

``python -S -m tests.bad_adb FOLDER WORDS…``. ``FOLDER/devices.json`` has the devices by serial, with ``state`` as
``adb devices`` shows it ("" while it is away), ``slow_boot`` (questions until Android has booted), ``comes_back``
(``connect`` or ``reconnect`` make it usable), ``is_full`` (its disk), ``cannot_clear`` (``pm clear`` fails), ``name``
(its marker) and ``spoiled`` (parts of its state that an episode changed, each until a command restores it; with
``stays`` none does). ``FOLDER/log`` has every command. As with the real program, ``connect`` always exits with 0.
"""

from __future__ import annotations

import fcntl
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import write_program

_RESTORES = {
    "accounts": "emu avd snapshot load",
    "apps:org.example.notes": "emu avd snapshot load|shell pm clear org.example.notes",
    "clock": r"emu avd snapshot load|shell date -u \d{10}\.\d\d ",
    "settings:system": "emu avd snapshot load|shell settings put system screen_brightness 102 ",
    "storage": "emu avd snapshot load|shell rm -rf",
}
"""What brings back each part of a device's state that ``spoiled`` may name."""
NO_SPACE = "cmd: Failure calling service: No space left on device"


def make_adb(folder: Path, root: Path) -> Path:
    """Writes the program; returns its path."""
    return write_program(folder / "adb", f'cd {root}\nexec {sys.executable} -S -m tests.bad_adb {folder} "$@"')


def set_devices(folder: Path, **devices: dict[str, Any]) -> None:
    """Replaces the devices, while no command reads or changes them."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "devices.json").write_text(json.dumps(devices))


def _answer(devices: dict[str, dict[str, Any]], words: Sequence[str]) -> tuple[int, str]:
    if words[0] == "devices":
        listed = [f"{serial}\t{device['state']}" for serial, device in devices.items() if device["state"]]
        return 0, "\n".join(["List of devices attached", *listed, ""])
    if words[0] == "connect":
        device = devices.get(words[1], {})
        if device.get("comes_back"):
            device["state"] = "device"
        return 0, f"connected to {words[1]}" if device.get("state") else f"failed to connect to {words[1]}: refused"
    if words[0] != "-s":
        return 0, ""
    serial, words = words[1], words[2:]
    device = devices.get(serial, {})
    if words[0] == "reconnect" and device.get("comes_back"):
        device["state"] = "device"
        return 0, "reconnecting"
    if not device.get("state"):
        return 1, f"error: device '{serial}' not found"
    if device["state"] != "device":
        return 1, f"error: device {device['state']}"
    return _answer_of_android(device, " ".join(words))


def _answer_of_android(device: dict[str, Any], command: str) -> tuple[int, str]:
    if command == "get-state":
        return 0, "device"
    if command == "shell getprop sys.boot_completed":
        device["slow_boot"] = device.get("slow_boot", 0) - 1
        return 0, "1" if device["slow_boot"] < 0 else ""
    if command == "shell getprop ro.debuggable":
        return 0, "1"
    if command.startswith("shell settings get"):
        return 0, device.get("name", "null")
    if command.startswith("shell settings put"):
        if device.get("is_full"):
            return 1, NO_SPACE
        if "rollout_buffer_device" in command:
            device["name"] = command.split()[-1]
    if parts := re.findall(r"echo @(\S+);", command):
        return 0, "\n".join([f"@{part}\n{_state_of(part, device.get('spoiled', []))}" for part in parts] + ["@end"])
    if not device.get("stays"):
        device["spoiled"] = [part for part in device.get("spoiled", []) if not re.match(_RESTORES[part], command)]
    if command.startswith("shell pm path"):
        return 0, "package:/data/app/base.apk"
    if command.startswith("shell pm clear"):
        return 0, "Failed" if device.get("cannot_clear") else "Success"
    if command.startswith("emu avd snapshot load"):
        return 0, "OK" if command.endswith(" clean") else "KO: no such snapshot"
    return 0, command.removeprefix("shell ")


def _state_of(part: str, spoiled: Sequence[str]) -> str:
    if part == "clock":
        return str(int(time.time()) - 3600 * (part in spoiled))
    if part == "settings:system":
        return f"screen_brightness={7 if part in spoiled else 102}"
    state = "spoiled" if part in spoiled else "clean"
    return f"Account {{{state}}}" if part == "accounts" else state


def answer(words: Sequence[str]) -> tuple[int, str]:
    """Answers one command; returns adb's exit code and what it says."""
    folder, *words = words
    while words and words[0] in ("-P", "-H"):
        words = words[2:]
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = Path(folder) / "devices.json"
        devices = json.loads(path.read_text())
        code, text = _answer(devices, words)
        path.write_text(json.dumps(devices))
        with (Path(folder) / "log").open("a") as log:
            log.write(" ".join(words) + "\n")
    return code, f"{text}\n"


if __name__ == "__main__":
    _code, _text = answer(sys.argv[1:])
    (sys.stderr if _code else sys.stdout).write(_text)
    sys.exit(_code)
