"""A scripted device that owns a real ``EmulatorProcess``, whose program only sleeps. For tests of what is left over.

The settings name it as ``device: tests.watchdog_device:create_device``. ``make_sdk`` writes the programs it starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice
from tests.processes import write_program

EMULATOR = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
"""Deaf to SIGTERM, as an emulator is that hangs."""

ADB = """case "$*" in
*sys.boot_completed* | *dev.bootcomplete*) echo 1 ;;
*"pm path android"*) echo package:/system/framework/framework-res.apk ;;
*get-state*) echo device ;;
esac
"""


class WatchdogDevice(FakeDevice):
    """Plays like ``FakeDevice``, and has an emulator as long as it lives."""

    def __init__(self, settings: AndroidWorldSettings, index: int) -> None:
        super().__init__(index)
        self._host = EmulatorProcess(settings, index)
        self._host.start()

    def close(self) -> None:
        self._host.close()
        super().close()


def create_device(settings: AndroidWorldSettings, index: int) -> WatchdogDevice:
    return WatchdogDevice(settings, index)


def make_sdk(folder: Path) -> dict[str, str]:
    """Writes an emulator, an adb and a virtual device; returns the settings that name them."""
    avd = folder / "avd" / "Base.avd"
    avd.mkdir(parents=True)
    (avd / "config.ini").write_text("AvdId=Base\n")
    emulator = f'exec {sys.executable} -S -c "{EMULATOR}" "$@"'
    return {
        "emulator_path": str(write_program(folder / "emulator", emulator)),
        "adb_path": str(write_program(folder / "adb", ADB)),
        "android_avd_home": str(avd.parent),
        "avd_name": "Base",
        "base_avd_name_pattern": "orphan_test_{}",
        "stop_timeout_s": "0.5",
    }


def recorded(records: Path, kind: str = "emulator") -> list[int]:
    """The recorded ids of processes of this kind."""
    ids = []
    for path in records.glob("[0-9]*-[0-9]*"):
        try:
            if f"kind={kind}\n" in path.read_text():
                ids.append(int(path.name.partition("-")[0]))
        except FileNotFoundError:  # ended just now
            continue
    return sorted(ids)
