"""Sets up the base device once: AndroidWorld's apps and the accessibility forwarder, by AndroidWorld's own set-up.

Run by ``scripts/set_up_base_device`` with the Python of the device workers. It boots the base device itself, not a
clone; the package downloads its apps, installs them, clicks through their first screens and stores a snapshot of each
app's data on the device, from which every episode restores it. Then Android is shut down, so that workers can clone it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, RolloutBufferError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import running_emulator
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess, check_sdk
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage, check_package

_SNAPSHOTS = "/data/data/android_world/snapshots"
_INDEX = 0


def set_up_base_device(settings: AndroidWorldSettings) -> list[str]:
    """Boots the base device, sets it up and shuts it down; returns the packages with a data snapshot.

    Raises:
        ConfigError: the packages, the SDK or the base device are missing.
            DeviceError: the base device is running, does not boot, or cannot be set up.
    """
    check_package()
    check_sdk(settings)
    base = Path(settings.android_avd_home).expanduser() / f"{settings.avd_name}.avd"
    pid = running_emulator(base)
    if pid is not None:
        raise DeviceError(f"the base device {settings.avd_name} is running (process {pid}): stop it first")
    folder = WorkerFolder("rollout_buffer_base_setup")
    package = AndroidWorldPackage(folder.path / "tmp")
    host = EmulatorProcess(settings, _INDEX, boots_the_base=True)
    try:
        package.connect(host.start(), set_up_apps=True)
        kept = package.adb("shell", "ls", _SNAPSHOTS).split()
        package.disconnect()
        host.shut_down()
    finally:
        package.disconnect()
        host.close()
        folder.remove()
    if not kept:
        raise DeviceError(f"AndroidWorld's set-up stored no snapshot of any app in {_SNAPSHOTS}: see its log")
    return kept


def main(words: Sequence[str]) -> int:
    """Sets up the base device that the host's settings name; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if words:
        sys.stderr.write("no arguments are accepted; the settings come from ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG\n")
        return 2
    try:
        settings = load_settings({})
        kept = set_up_base_device(settings)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except RolloutBufferError as error:
        sys.stderr.write(f"the base device could not be set up: {error.message}\n{error.detail.get('log', '')}\n")
        return 1
    sys.stdout.write(f"{settings.avd_name} is set up, with snapshots of {len(kept)} apps. Workers can clone it now.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
