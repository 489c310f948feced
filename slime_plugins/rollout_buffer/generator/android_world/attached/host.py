"""``AttachedHost``: an Android that somebody else runs, reached through adb."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.file_locks import try_lock
from slime_plugins.rollout_buffer.devices.kinds import misconfigured
from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer
from slime_plugins.rollout_buffer.generator.android_world.android_host import ANIMATIONS, AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.attached.inventory import (
    AttachedDevice,
    RestoreWay,
    inventory_of,
)
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StateCheck

logger = logging.getLogger(__name__)

_NAME_KEY = "rollout_buffer_device"
"""The global setting on the device that holds its name in the inventory, to find a device whose serial has changed."""
_RECONNECT_TIMEOUT_S = 20.0
_OFFLINE_TIMEOUT_S = 10.0
_RESTORE_TIMEOUT_S = 240.0
_POLL_S = 0.5
_SHARED_STORAGE = (
    "Alarms", "Audiobooks", "DCIM", "Documents", "Download", "Movies", "Music", "Notifications", "Pictures",
    "Podcasts", "Recordings", "Ringtones",
)  # fmt: skip
# android_env restarts the adb server after every failed command, which would disconnect all other devices of the
# server. Its commands are ADB -P PORT VERB …, so that the third argument is the verb.
_ADB_WITHOUT_RESTART = """#!/bin/sh
case "$3" in kill-server | start-server) exit 0 ;; esac
exec {adb} "$@"
"""


class AttachedHost:
    """The ``AndroidHost`` of entry ``index`` of the inventory. The device is locked on this host until ``close``."""

    def __init__(self, settings: AndroidWorldSettings, index: int) -> None:
        inventory = inventory_of(settings.device_options)
        self.name, self._entry = list(inventory.items())[index]
        others = (entry for name, entry in inventory.items() if name != self.name)
        self._other_serials = {entry.listed_as for entry in others if entry.adb_server == self._entry.adb_server}
        self._index = index
        self._start_timeout_s = settings.android_timeout_s
        self._adb_path = str(Path(settings.adb_path).expanduser())
        self._server = AdbServer(self._adb_path, self._entry.adb_server)
        self._serial = self._entry.listed_as
        self._lock: IO[str] | None = None
        self._folder: WorkerFolder | None = None

    def start(self) -> AndroidEndpoint:
        """As ``AndroidHost.start``: connects, and waits until Android is up."""
        if not os.access(self._adb_path, os.X_OK):
            raise misconfigured(f"device: attached needs adb: adb_path names no program at {self._adb_path}")
        self._lock_device()
        try:
            self._await_up(self._start_timeout_s)
            return AndroidEndpoint(
                serial=self._serial,
                adb_path=self._write_adb_wrapper(),
                adb_server_port=self._server.port,
                console_port=self._entry.console_port,
                grpc_port=self._entry.grpc_port,
                capabilities=capabilities_of(self._entry, self._server, self._serial),
                state=StateCheck(file=self._file("state"), required=frozenset(self._entry.check_restored)),
            )
        except BaseException:
            self.close()
            raise

    def check_alive(self) -> bool:
        """As ``AndroidHost.check_alive``: a device that dropped is connected again."""
        if self._lock is None:
            raise DeviceError(f"the device {self.name} is not started")
        if self._server.run("-s", self._serial, "get-state") == (True, "device"):
            return True
        logger.info("the device %s dropped: connecting again", self.name)
        self._await_up(_RECONNECT_TIMEOUT_S)
        return False

    def restore(self, packages: Collection[str]) -> bool:
        """As ``AndroidHost.restore``, in the way that the entry's ``restore`` names."""
        stayed_connected = self.check_alive()
        way = self._entry.restore
        if not isinstance(way, RestoreWay):
            self._clear_apps_and_storage(packages)
            return stayed_connected
        if way.snapshot is not None:
            self._server.expect(["-s", self._serial, "emu", "avd", "snapshot", "load", way.snapshot], containing="OK")
        else:
            self._run_restore_command(way.command or [])
        self._await_up(_RESTORE_TIMEOUT_S)
        return False

    def lost(self) -> str:
        """Returns "": a device that dropped is connected again by the next call."""
        return ""

    def close(self) -> None:
        """Unlocks the device. The device and its adb server belong to their owner and keep running."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def _lock_device(self) -> None:
        """Locks the device against other device workers of this host."""
        if self._lock is not None:
            return
        self._lock = try_lock(self._file("lock"))
        if self._lock is None:
            raise DeviceError(f"the device {self.name} is used by another device worker of this host")

    def _file(self, suffix: str) -> Path:
        """Returns the path of a file about the device, which all device workers of this host share."""
        folder = Path(os.environ.get("ROLLOUT_BUFFER_PORT_LOCKS", f"/tmp/rollout_buffer_ports_{os.getuid()}"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = re.sub(r"[^A-Za-z0-9.-]", "_", f"{self._entry.adb_server}-{self._entry.listed_as}")
        return folder / f"attached-{key}.{suffix}"

    # ---- connecting

    def _await_up(self, timeout_s: float) -> None:
        """Tries to connect until Android answers; then stores the device's name on it and switches animations off.

        Raises:
            DeviceError: Android does not answer within the timeout, or adb may not use the device; the message has
                adb's output.
        """
        deadline = time.monotonic() + timeout_s
        offline_until = time.monotonic() + min(_OFFLINE_TIMEOUT_S, timeout_s / 2)
        while True:
            try:
                problem = self._why_unusable()
            except DeviceError as error:  # the adb server does not answer
                problem = error.message
            if not problem:
                values = {_NAME_KEY: self.name} | dict.fromkeys(ANIMATIONS, "0")
                for key, value in values.items():
                    self._server.expect(["-s", self._serial, "shell", "settings", "put", "global", key, value])
                return
            if "unauthorized" in problem or "no permissions" in problem:
                raise misconfigured(f"adb may not use the device {self.name}: {problem}")
            is_offline = "offline" in problem
            if time.monotonic() >= (min(deadline, offline_until) if is_offline else deadline):
                raise DeviceError(f"the device {self.name} did not come up: {problem}")
            time.sleep(_POLL_S)

    def _why_unusable(self) -> str:
        """Connects if needed; returns why the device cannot be used now, "" if it can.

        Raises:
            DeviceError: the adb server does not answer.
        """
        connect_output = ""
        states = self._server.states()
        if self._entry.connect and states.get(self._entry.connect) != "device":
            if states.get(self._entry.connect) == "offline":
                self._server.run("disconnect", self._entry.connect)
            _, connect_output = self._server.run("connect", self._entry.connect)
            states = self._server.states()
        self._serial = self._serial_among(states)
        state = states.get(self._serial)
        if state is None:
            listed = ", ".join(f"{serial} {state}" for serial, state in states.items()) or "no device"
            return f"{connect_output + '; ' if connect_output else ''}adb lists {listed}, not {self._serial}"
        if state != "device":
            if state == "offline":
                self._server.run("-s", self._serial, "reconnect")
            return f"{self._serial} {state}{'; ' + connect_output if connect_output else ''}"
        booted, answer = self._server.run("-s", self._serial, "shell", "getprop", "sys.boot_completed")
        if not booted or answer != "1":
            return f"Android has not booted: {answer or 'sys.boot_completed is not set'}"
        _, answer = self._server.run("-s", self._serial, "shell", "pm", "path", "android")
        return "" if "package:" in answer else f"adb shell pm path android: {answer or 'no answer'}"

    def _serial_among(self, states: dict[str, str]) -> str:
        """Returns the device's serial: that of the inventory, or the new serial of a device that stores our name."""
        if self._entry.listed_as in states:
            return self._entry.listed_as
        for serial, state in states.items():
            if state == "device" and serial not in self._other_serials:
                _, name = self._server.run("-s", serial, "shell", "settings", "get", "global", _NAME_KEY)
                if name == self.name:
                    logger.warning("the device %s is %s now, not %s", self.name, serial, self._entry.listed_as)
                    return serial
        return self._entry.listed_as

    # ---- restoring

    def _clear_apps_and_storage(self, packages: Collection[str]) -> None:
        """Clears the data of these apps, and the folders of the shared storage."""
        for package in packages:
            installed, _ = self._server.run("-s", self._serial, "shell", "pm", "path", package)
            if installed:
                self._server.expect(["-s", self._serial, "shell", "pm", "clear", package], containing="Success")
        folders = " ".join(f"/sdcard/{folder}/*" for folder in _SHARED_STORAGE)
        self._server.expect(["-s", self._serial, "shell", f"rm -rf {folders}"])

    def _run_restore_command(self, command: list[str]) -> None:
        environment = os.environ | {"ANDROID_SERIAL": self._serial, "ROLLOUT_BUFFER_DEVICE_NAME": self.name}
        environment["ANDROID_ADB_SERVER_PORT"] = str(self._server.port)
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_RESTORE_TIMEOUT_S, check=False, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"the restore command of {self.name} failed: {error}") from error
        if result.returncode != 0:
            output = ((result.stderr or result.stdout).strip() or "no output")[-600:]
            raise DeviceError(f"the restore command of {self.name} exited with code {result.returncode}: {output}")

    # ---- the endpoint

    def _write_adb_wrapper(self) -> str:
        """Writes a program that runs adb but never restarts the server; returns its path."""
        if self._folder is None:
            self._folder = WorkerFolder(f"rollout_buffer_attached_{self._index}")
        path = self._folder.path / "adb"
        path.write_text(_ADB_WITHOUT_RESTART.format(adb=shlex.join([self._adb_path, *self._server.host_words])))
        path.chmod(0o755)
        return str(path)


def capabilities_of(entry: AttachedDevice, server: AdbServer, serial: str) -> frozenset[Capability]:
    """Returns the entry's capabilities, or without them those that can be seen on the connected device."""
    if entry.capabilities is not None:
        capabilities = set(entry.capabilities)
    else:
        capabilities = {Capability.RESTORE, Capability.CLOCK, Capability.ACCESSIBILITY}
        if entry.console_port is not None:
            capabilities |= {Capability.SMS} if entry.grpc_port is None else {Capability.SMS, Capability.GRPC}
        _, user = server.run("-s", serial, "shell", "whoami")
        _, is_debuggable = server.run("-s", serial, "shell", "getprop", "ro.debuggable")
        # With ro.debuggable `adb root` works, which the package runs where it needs it.
        if user == "root" or is_debuggable == "1":
            capabilities.add(Capability.ROOT)
    # With a shared kernel, setting the clock would set the host's clock.
    return frozenset(capabilities - {Capability.CLOCK} if entry.shares_host_kernel else capabilities)
