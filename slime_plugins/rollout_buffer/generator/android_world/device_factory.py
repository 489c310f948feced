"""From the settings to a device. Runs in the device worker, so heavy imports happen there and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device import Device

__all__ = ["DeviceFactory", "create_device"]

DeviceFactory = Callable[[AndroidWorldSettings, int], Device]
"""Makes device number ``index``. May take as long as a phone takes to boot."""


def create_device(settings: AndroidWorldSettings, index: int) -> Device:
    """Returns a device, ready for its first ``reset``.

    ``device: android_world`` is the real package on an emulator; with ``android_world_python`` it runs in a process of
    that Python.

    Raises:
        ConfigError: the settings name no device that can be made here.
        DeviceError: the device did not come up.
    """
    own: dict[str, DeviceFactory] = {"simulated": _simulated_phone, "android_world": _android_world}
    factory = own.get(settings.device) or _factory(settings.device)
    return factory(settings, index)


def _android_world(settings: AndroidWorldSettings, index: int) -> Device:
    if settings.android_world_python:
        from slime_plugins.rollout_buffer.generator.android_world.device_process import DeviceProcess

        return DeviceProcess(settings.android_world_python, settings, index)
    from slime_plugins.rollout_buffer.generator.android_world.android_world_device import AndroidWorldDevice

    return AndroidWorldDevice(settings, index)


def _simulated_phone(settings: AndroidWorldSettings, _index: int) -> Device:
    from slime_plugins.rollout_buffer.generator.android_world.simulated_phone.phone import (
        SimulatedPhone,
        SimulatedPhoneConfig,
    )

    config = SimulatedPhoneConfig(
        screenshot_max_pixels=settings.screenshot_max_pixels,
        image_format=settings.image_format.value,
        step_latency_s=settings.simulated_latency_s,
    )
    return SimulatedPhone(config)


def _factory(address: str) -> DeviceFactory:
    module_name, _, function_name = address.partition(":")
    try:
        return cast("DeviceFactory", getattr(importlib.import_module(module_name), function_name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the device factory {address} cannot be loaded: {error}") from error
