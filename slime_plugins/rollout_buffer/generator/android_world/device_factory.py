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

    ``device: android_world`` (the real package on an emulator) is not built yet and says so here.

    Raises:
        ConfigError: the settings name no device that can be made here.
        DeviceError: the device did not come up.
    """
    if settings.device == "android_world":
        raise ConfigError("device: android_world needs the emulator adapter, which this version does not have yet")
    factory = _simulated_phone if settings.device == "simulated" else _factory(settings.device)
    return factory(settings, index)


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
