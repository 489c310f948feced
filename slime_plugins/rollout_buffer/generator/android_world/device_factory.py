"""Creates an Android device from settings, in its device worker: only this process imports heavy packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.devices.device_process import DeviceProcess
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.generator import config_sources
from slime_plugins.rollout_buffer.generator.android_world.config import DEVICE_KIND, AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import kind_of
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action


def from_options(options: Mapping[str, Any], index: int) -> Device[Action]:
    """Android's ``DeviceKind``: ``options`` come from ``AndroidWorldSettings.for_devices``."""
    return create_device(_settings_of(options), index)


def make_virtual_device(options: Mapping[str, Any], index: int) -> None:
    """Clones the base device for worker ``index``, unless it is cloned already.

    Raises:
        ConfigError, DeviceError: as ``clone_avd``.
    """
    from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import check_sdk, make_clone
    from slime_plugins.rollout_buffer.generator.android_world.emulator.package import check_package

    settings = _settings_of(options)
    if not settings.android_world_python:  # otherwise the process of that Python checks its own packages
        check_package()  # before a copy that takes minutes
    check_sdk(settings)
    make_clone(settings, index)


def create_device(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    """Returns a device that is ready for its first ``reset``.

    Kinds that use the package ``android_world`` run in a process of ``android_world_python``, if it is set.

    Raises:
        ConfigError: the settings name no device that can be created here.
        DeviceError: the device did not come up.
    """
    kind = kind_of(settings.device)
    if kind.uses_package and settings.android_world_python:
        # In that process the setting is empty, so that it creates the device itself.
        options = settings.for_devices().device_options | {"android_world_python": ""}
        return DeviceProcess(settings.android_world_python, DEVICE_KIND, options, index, setting="android_world_python")
    return kind(settings, index)


def _settings_of(options: Mapping[str, Any]) -> AndroidWorldSettings:
    return config_sources.validated(AndroidWorldSettings, config_sources.Layer(values=dict(options)))
