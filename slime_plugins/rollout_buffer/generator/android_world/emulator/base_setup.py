"""Installs AndroidWorld's apps, by AndroidWorld's own set-up, once on the base device or on each attached device.

Run by ``scripts/set_up_base_device`` with the Python of the device workers. It boots the base device itself, not a
clone; the package downloads its apps, installs them, clicks through their first screens and stores a snapshot of each
app's data on the device, from which every episode restores it. Then Android is shut down, so that workers can clone it.
Attached devices stay on. The accessibility forwarder is installed where the device needs it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, RolloutBufferError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidHost
from slime_plugins.rollout_buffer.generator.android_world.attached.host import AttachedHost
from slime_plugins.rollout_buffer.generator.android_world.attached.inventory import inventory_of
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, load_settings
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import running_emulator
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess, check_sdk
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage, check_package
from slime_plugins.rollout_buffer.generator.android_world.restored_state import SNAPSHOTS

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
    host = EmulatorProcess(settings, _INDEX, boots_the_base=True)
    return _set_up(host, finish=host.shut_down)


def set_up_attached_device(settings: AndroidWorldSettings, index: int) -> list[str]:
    """Sets up device ``index`` of the inventory; returns the packages with a data snapshot.

    Raises:
        ConfigError: the packages or adb are missing.
        DeviceError: the device does not answer, or cannot be set up.
    """
    check_package()
    return _set_up(AttachedHost(settings, index), finish=lambda: None)


def _set_up(host: AndroidHost, *, finish: Callable[[], None]) -> list[str]:
    folder = WorkerFolder("rollout_buffer_base_setup")
    package = AndroidWorldPackage(folder.path / "tmp")
    try:
        package.connect(host.start(), set_up_apps=True)
        apps = package.adb("shell", "ls", SNAPSHOTS).split()
        package.disconnect()
        finish()
    finally:
        package.disconnect()
        host.close()
        folder.remove()
    if not apps:
        raise DeviceError(f"AndroidWorld's set-up stored no snapshot of any app in {SNAPSHOTS}: see its log")
    return apps


def main(words: Sequence[str]) -> int:
    """Sets up the base device or the attached devices of the host's settings; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if words:
        sys.stderr.write("no arguments are accepted; the settings come from ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG\n")
        return 2
    try:
        settings = load_settings({})
        if settings.device == "attached":
            for index, name in enumerate(inventory_of(settings.device_options)):
                apps = set_up_attached_device(settings, index)
                sys.stdout.write(f"{name} is set up, with snapshots of {len(apps)} apps.\n")
            return 0
        apps = set_up_base_device(settings)
    except ConfigError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except RolloutBufferError as error:
        sys.stderr.write(f"the device could not be set up: {error.message}\n{error.detail.get('log', '')}\n")
        return 1
    sys.stdout.write(f"{settings.avd_name} is set up, with snapshots of {len(apps)} apps. Workers can clone it now.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
