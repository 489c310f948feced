"""``device: attached``: the Android devices in an inventory file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer
from slime_plugins.rollout_buffer.generator.android_world.attached.host import AttachedHost, capabilities_of
from slime_plugins.rollout_buffer.generator.android_world.attached.inventory import (
    AttachedDevice,
    inventory_of,
    read_options,
)
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import AndroidKind, DeviceCheck
from slime_plugins.rollout_buffer.generator.android_world.task_needs import check_of_tasks
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action


def _create(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice

    return AndroidWorldDevice(settings, index, AttachedHost(settings, index))


def _defaults(values: Mapping[str, Any]) -> Mapping[str, Any]:
    options = values.get("device_options")
    devices = read_options(options if isinstance(options, Mapping) else {})["inventory"]
    return {"num_workers": len(devices), "resources_per_worker": {"num_cpus": 1, "memory": 1024**3}}


def _check(settings: AndroidWorldSettings) -> None:
    wanted = settings.num_workers + settings.spare_devices
    available = len(inventory_of(settings.device_options))
    if wanted > available:
        raise ConfigError(f"num_workers and spare_devices ask for {wanted} devices, and the inventory has {available}")


def _examine(settings: AndroidWorldSettings) -> list[DeviceCheck]:
    adb_path = Path(settings.adb_path).expanduser()
    if not os.access(adb_path, os.X_OK):
        remedy = "install the Android SDK package platform-tools, or set adb_path"
        return [DeviceCheck(name="adb", passed=False, detail=f"no program at {adb_path}", remedy=remedy)]
    return [
        check
        for name, entry in inventory_of(settings.device_options).items()
        for check in _checks_of(AdbServer(str(adb_path), entry.adb_server), name, entry)
    ]


def _checks_of(server: AdbServer, name: str, entry: AttachedDevice) -> list[DeviceCheck]:
    """Returns whether adb lists the device of an entry as usable, and if it does, which tasks the device can play."""
    connect_output = server.run("connect", entry.connect)[1] if entry.connect else ""
    try:
        state = server.states().get(entry.listed_as, connect_output or f"adb does not list {entry.listed_as}")
    except DeviceError as error:
        state = error.message
    allow = "unlock its screen and allow USB debugging"
    listen = f"start it, and let its adb listen at {entry.connect}: of a phone with `adb tcpip PORT` over USB"
    remedy = f"{listen if 'failed to connect' in connect_output else allow}; `adb devices` must list it as device"
    check = DeviceCheck(name=f"device {name}", passed=state == "device", detail=state, remedy=remedy)
    if not check.passed:
        return [check]
    return [check, check_of_tasks(f"tasks of {name}", capabilities_of(entry, server, entry.listed_as))]


KIND = AndroidKind(
    create=_create, uses_package=True, read_options=read_options, defaults=_defaults, check=_check, examine=_examine
)
