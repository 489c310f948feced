"""The Android emulator of one device worker: start, boot, stop, cleanup."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.kinds import misconfigured
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.android_world.android_host import ANIMATIONS, AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import (
    CHECKOUT,
    CopyLimits,
    clone_avd,
    mark_as_incomplete,
)
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_ownership import AvdOwnership
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import (
    NO_ADB_SEARCH,
    EmulatorPorts,
    hold_ports,
    is_free,
)
from slime_plugins.rollout_buffer.generator.android_world.restored_state import SNAPSHOTS, StateCheck

logger = logging.getLogger(__name__)

DEVICE_MARK = "ROLLOUT_BUFFER_DEVICE"
"""Environment variable of all processes of an emulator: the name of its clone."""

CHECKOUT_MARK = "ROLLOUT_BUFFER_DEVICE_CHECKOUT"
"""Environment variable: the checkout that started the emulator. ``scripts/cleanup.sh`` stops those of its own
checkout."""

_WATCHDOG = Path(__file__).with_name("watchdog.py")
_POLL_S = 0.5
_QUERY_TIMEOUT_S = 15.0
_SHUT_DOWN_TIMEOUT_S = 60.0
_MAX_OFFLINE_SHARE = 0.25
"""A boot fails once adb has listed the emulator as offline, without a break, for this share of the time limit."""
_WATCHDOG_TIMEOUT_S = 30.0
"""Time that a watchdog needs in addition to ``stop_timeout_s``: three adb commands of at most 10 s."""
_METRICS_FLAG = "-no-metrics"
"""A flag that older emulators do not know; it is left out after an emulator has refused it."""
_LOG_LINES = 5
_LOG_CHARACTERS = 600
"""Length of the log's end in messages about a failed boot."""


def records_folder() -> Path:
    """Returns the folder in which watchdogs record the processes of this user's emulators."""
    # Not tempfile.gettempdir(): each device worker has its own temporary folder.
    return Path(os.environ.get("ROLLOUT_BUFFER_DEVICE_RECORDS", f"/tmp/rollout_buffer_devices_{os.getuid()}"))


def check_sdk(settings: AndroidWorldSettings) -> None:
    """Checks the Android SDK.

    Raises:
        ConfigError: a program or the virtual device is missing.
    """
    for key in ("emulator_path", "adb_path"):
        path = Path(getattr(settings, key)).expanduser()
        if not os.access(path, os.X_OK):
            raise ConfigError(f"device: android_world needs the Android SDK: {key} names no program at {path}")
    avd = Path(settings.android_avd_home).expanduser() / f"{settings.avd_name}.avd" / "config.ini"
    if not avd.is_file():
        raise ConfigError(f"device: android_world needs the virtual device {settings.avd_name}: there is no {avd}")


def make_clone(settings: AndroidWorldSettings, index: int, *, owner: AvdOwnership | None = None) -> None:
    """Clones the virtual device of worker ``index``, unless the clone is current; see ``clone_avd``.

    Raises:
        ConfigError, DeviceError: as ``clone_avd``.
    """
    limits = CopyLimits(seconds_per_gb=settings.clone_s_per_gb, at_once=settings.clones_at_once)
    home = Path(settings.android_avd_home).expanduser()
    clone_avd(home, settings.avd_name, settings.base_avd_name_pattern.format(index), limits, owner=owner)


def screen_size(avd: Path) -> tuple[int, int] | None:
    """Returns width and height in pixels from the configuration of the virtual device in this folder, or None."""
    entries = (line.partition("=") for line in (avd / "config.ini").read_text().splitlines())
    values = {key.strip(): value.strip() for key, _, value in entries}
    width, height = values.get("hw.lcd.width", ""), values.get("hw.lcd.height", "")
    return (int(width), int(height)) if width.isdecimal() and height.isdecimal() else None


class EmulatorProcess:
    """The ``AndroidHost`` of worker ``index`` that owns an emulator: clone, ports, adb server and process."""

    def __init__(self, settings: AndroidWorldSettings, index: int, *, boots_the_base: bool = False) -> None:
        """``boots_the_base`` starts the base device itself instead of a clone, to set it up."""
        self._settings = settings
        self._index = index
        self._boots_the_base = boots_the_base
        self._avd_home = Path(settings.android_avd_home).expanduser()
        self._avd_name = settings.avd_name if boots_the_base else settings.base_avd_name_pattern.format(index)
        self._owner: AvdOwnership | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._adb_error = ""
        self._is_discarded = False
        self._knows_metrics_flag = True
        self.ports: EmulatorPorts | None = None

    @property
    def adb_path(self) -> str:
        """Path of the adb program."""
        return str(Path(self._settings.adb_path).expanduser())

    def start(self) -> AndroidEndpoint:
        """Boots the emulator and returns its endpoint once Android is up. May be called again after a failure.

        Raises:
            ConfigError: as ``check_sdk`` and ``clone_avd``.
            DeviceError: another process uses the virtual device, or it did not boot in time; everything is cleaned up.
        """
        check_sdk(self._settings)
        if self._owner is None:
            self._owner = AvdOwnership(self._avd_home, self._avd_name, CHECKOUT)
        try:
            if not self._boots_the_base:
                make_clone(self._settings, self._index, owner=self._owner)
            return self._boot()
        except BaseException:
            self.close()
            raise

    def check_alive(self) -> bool:
        """As ``AndroidHost.check_alive``; an emulator is never reconnected, only replaced."""
        if self._watchdog is None or self._watchdog.poll() is not None:
            raise DeviceError(f"the emulator's process is gone{self._evidence()}")
        if self._is_discarded:
            raise DeviceError(f"{self._avd_name} was not restored: the next boot clones it again")
        if "device" not in self._adb("get-state"):
            raise DeviceError(f"the emulator is not a usable device{self._evidence()}")
        return True

    def restore(self, packages: Collection[str]) -> bool:
        """As ``check_alive``: AndroidWorld restores its apps itself, and its tasks clear other state that they use."""
        return self.check_alive()

    def _discard_clone(self) -> None:
        """Marks the clone as incomplete, so that the next boot, of another worker, makes it again."""
        self._is_discarded = True
        mark_as_incomplete(self._avd_home, self._avd_name)

    def lost(self) -> str:
        """Returns why the emulator is gone although it was not stopped, "" while it runs."""
        watchdog = self._watchdog
        return "" if watchdog is None or watchdog.poll() is None else "the emulator's process has ended"

    def close(self) -> None:
        """Stops the emulator and its adb server, and releases the virtual device. It may be started again."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            _close_watchdog(watchdog, self._settings.stop_timeout_s + _WATCHDOG_TIMEOUT_S)
        ports, self.ports = self.ports, None
        if ports is not None:
            self._end_adb_server(ports)
            ports.release()
        owner, self._owner = self._owner, None
        if owner is not None:
            for lock in (self._avd_home / f"{self._avd_name}.avd").glob("*.lock"):
                lock.unlink(missing_ok=True)  # left by the process that just exited; it would prevent the next start
            owner.release()

    def _end_adb_server(self, ports: EmulatorPorts) -> None:
        """Stops an adb server that a command to the dead emulator started after the watchdog's exit."""
        if is_free(ports.adb_server):
            return
        try:
            _output([self.adb_path, "-P", str(ports.adb_server), "kill-server"])
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("the adb server on port %d does not exit: %s", ports.adb_server, error)

    def shut_down(self) -> None:
        """Shuts Android down, so that its data is on disk; then as ``close``."""
        self._adb("shell", "sync")
        self._adb("shell", "reboot", "-p")
        deadline = time.monotonic() + _SHUT_DOWN_TIMEOUT_S
        while self._watchdog is not None and self._watchdog.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self.close()

    def _boot(self) -> AndroidEndpoint:
        settings = self._settings
        timeout_s = settings.android_timeout_s
        deadline = time.monotonic() + timeout_s
        ports = self.ports = hold_ports(
            settings.base_console_port + 2 * self._index,
            settings.base_grpc_port + self._index,
            settings.base_adb_server_port + self._index,
            lowest_console=settings.base_console_port,
        )
        self._watchdog = self._launch(ports)
        offline_since = time.monotonic()
        while time.monotonic() < deadline:
            if self._watchdog.poll() is not None:
                if self._knows_metrics_flag and f"unknown option: {_METRICS_FLAG}" in self._log():
                    self._knows_metrics_flag = False
                    _close_watchdog(self._watchdog, _WATCHDOG_TIMEOUT_S)
                    self._watchdog = self._launch(ports)
                    continue
                raise DeviceError(f"the emulator exited while it booted{self._evidence()}")
            if self._is_booted():
                self._check_screen()
                for scale in ANIMATIONS:
                    self._adb("shell", "settings", "put", "global", scale, "0")
                logger.info("device %d is up as %s", self._index, ports.serial)
                return self._endpoint(ports)
            if "unauthorized" in self._adb_error:  # neither waiting nor another boot helps
                raise misconfigured(f"adb may not use the emulator{self._evidence()}")
            if "offline" not in self._adb_error:
                offline_since = time.monotonic()
            if time.monotonic() - offline_since > timeout_s * _MAX_OFFLINE_SHARE:
                raise DeviceError(f"adb finds the emulator offline{self._evidence()}")
            time.sleep(_POLL_S)
        raise DeviceError(f"the emulator was not up after {timeout_s:g} s{self._evidence()}")

    def _endpoint(self, ports: EmulatorPorts) -> AndroidEndpoint:
        return AndroidEndpoint(
            serial=ports.serial,
            adb_path=self.adb_path,
            adb_server_port=ports.adb_server,
            console_port=ports.console,
            grpc_port=ports.grpc,
            capabilities=frozenset(Capability),
            state=StateCheck(
                file=self._avd_home / f"{self._avd_name}.avd" / "rollout_buffer_state.json",
                required=frozenset(self._settings.device_options.get("check_restored", ())),
                snapshots=SNAPSHOTS,
                give_up=self._discard_clone,
            ),
        )

    def _launch(self, ports: EmulatorPorts) -> subprocess.Popen[bytes]:
        settings = self._settings
        flags = shlex.split(settings.emulator_flags)
        if not self._knows_metrics_flag:
            flags.remove(_METRICS_FLAG)
        command = [
            *(str(Path(settings.emulator_path).expanduser()), "-avd", self._avd_name),
            *("-port", str(ports.console), "-grpc", str(ports.grpc)),
            *flags,
            "-no-snapshot",  # every boot is a cold boot of the clone
        ]
        watchdog = [
            *(sys.executable, "-S", str(_WATCHDOG), str(records_folder()), self._avd_name),
            *(self.adb_path, str(ports.adb_server), ports.serial, str(settings.stop_timeout_s), "--"),
        ]
        self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._log_path.is_file():
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [*watchdog, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(ports),
                start_new_session=True,
                # The device stays locked while its emulator runs, even if this process is killed.
                pass_fds=() if self._owner is None else (self._owner.fileno(),),
            )

    def _environment(self, ports: EmulatorPorts) -> dict[str, str]:
        """Returns the emulator's environment: its own adb server, and no proxy for this host."""
        sdk = str(Path(self._settings.android_sdk_root).expanduser())
        return {
            **os.environ,
            **NO_ADB_SEARCH,
            "ANDROID_AVD_HOME": str(self._avd_home),
            "ANDROID_SDK_ROOT": sdk,
            "ANDROID_HOME": sdk,
            "ANDROID_ADB_SERVER_PORT": str(ports.adb_server),
            "no_proxy": "localhost,127.0.0.1,10.0.2.2",
            DEVICE_MARK: self._avd_name,
            CHECKOUT_MARK: str(CHECKOUT),
        }

    def _is_booted(self) -> bool:
        """Returns True if both boot properties are set and the package manager answers: apps cannot start before."""
        flags = ("sys.boot_completed", "dev.bootcomplete")
        return all(self._adb("shell", "getprop", flag).strip() == "1" for flag in flags) and (
            "package:" in self._adb("shell", "pm", "path", "android")
        )

    def _check_screen(self) -> None:
        """Raises ``DeviceError`` if the screen's size differs from the virtual device's configuration.

        A size set once by ``wm size 720x1280`` stays in the device's data, and every coordinate would be wrong.
        """
        wanted = screen_size(self._avd_home / f"{self._avd_name}.avd")
        if wanted is None:
            return
        self._adb("shell", "wm", "size", "reset")
        reported = self._adb("shell", "wm", "size")
        sizes = re.findall(r"(?:Physical|Override) size: (\d+)x(\d+)", reported)
        size = tuple(map(int, sizes[-1])) if sizes else None
        if size != wanted:
            actual = "of unknown size" if size is None else f"{size[0]}x{size[1]}"
            raise DeviceError(
                f"the screen is {actual}, but config.ini of {self._avd_name} has {wanted[0]}x{wanted[1]}",
                {"said": reported},
            )

    def _adb(self, *words: str) -> str:
        """Runs one adb command; returns "" if it failed or timed out, and records the error for later messages."""
        if self.ports is None:
            return ""
        self._adb_error = ""
        command = [self.adb_path, "-P", str(self.ports.adb_server), "-s", self.ports.serial, *words]
        try:
            return _output(command)
        except (OSError, subprocess.SubprocessError) as error:
            logger.debug("adb %s: %s", words, error)
            error_output = getattr(error, "stderr", None) or str(error).encode()
            self._adb_error = f"adb {words[0]}: {error_output.decode('utf-8', 'replace').strip()}"
            return ""

    @property
    def _log_path(self) -> Path:
        """Path of the emulator's log; it outlives the device, and so does the log of the previous boot."""
        return records_folder() / f"{self._avd_name}.log"

    def _log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.is_file() else ""

    def _evidence(self) -> str:
        """Returns adb's last error and the end of the emulator's log, as a suffix of a message."""
        lines = [line.strip() for line in self._log().splitlines() if line.strip()]
        tail = " | ".join(lines[-_LOG_LINES:])
        log = f"{self._log_path} ends: {tail[-_LOG_CHARACTERS:]}" if tail else f"{self._log_path} is empty"
        return "; ".join(["", *filter(None, [self._adb_error]), log])


def _output(command: Sequence[str]) -> str:
    environment = {**os.environ, **NO_ADB_SEARCH}
    result = subprocess.run(command, check=True, capture_output=True, timeout=_QUERY_TIMEOUT_S, env=environment)
    return result.stdout.decode("utf-8", "replace")


def _close_watchdog(watchdog: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Closes the watchdog's stdin, on which it stops the emulator, and waits for its exit."""
    if watchdog.stdin is not None:
        watchdog.stdin.close()
    try:
        watchdog.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        logger.error("the emulator's watchdog (pid %d) does not exit; killing it", watchdog.pid)
        watchdog.kill()
        watchdog.wait()
