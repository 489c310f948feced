"""Creates a phone from the settings. Runs in the device worker, so that only this process imports heavy packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from slime_plugins.rollout_buffer.devices.device_process import DeviceProcess
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.devices.kinds import load_kind
from slime_plugins.rollout_buffer.generator.android_world.config import DEVICE_KIND, AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action

DeviceFactory = Callable[[AndroidWorldSettings, int], Device[Action]]
"""Creates device number ``index``. May take as long as a boot."""


def from_options(options: Mapping[str, Any], index: int) -> Device[Action]:
    """Android's ``DeviceKind``: ``options`` come from ``AndroidWorldSettings.for_devices``."""
    return create_device(AndroidWorldSettings.model_validate(options), index)


def make_virtual_device(options: Mapping[str, Any], index: int) -> None:
    """Clones the base device for worker ``index``, unless it is cloned already.

    Raises:
        ConfigError, DeviceError: as ``clone_avd``.
    """
    from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import check_sdk, make_clone
    from slime_plugins.rollout_buffer.generator.android_world.emulator.package import check_package

    settings = AndroidWorldSettings.model_validate(options)
    if not settings.android_world_python:  # before minutes of copying; otherwise that Python checks
        check_package()
    check_sdk(settings)
    make_clone(settings, index)


def create_device(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    """Returns a device that is ready for its first ``reset``.

    ``device: android_world`` is the real package on an emulator; with ``android_world_python`` it runs in a process of
    that Python.

    Raises:
        ConfigError: the settings name no device that can be created here.
        DeviceError: the device did not come up.
    """
    if settings.device == "android_world":
        return _android_world(settings, index)
    return cast("DeviceFactory", load_kind(settings.device))(settings, index)


def _android_world(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    if settings.android_world_python:
        # There it is this Python, so the setting is empty from there on.
        options = settings.for_devices().device_options | {"android_world_python": ""}
        return DeviceProcess(settings.android_world_python, DEVICE_KIND, options, index, setting="android_world_python")
    from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
    from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess

    return AndroidWorldDevice(settings, index, EmulatorProcess(settings, index))
