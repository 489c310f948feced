"""The devices of this process, under the name that guides use. One pool, shared by all episodes on an event loop."""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.devices.leased_device import LeasedDevice
from slime_plugins.rollout_buffer.generator.android_world.custom_generate import close_resources, lend_device

__all__ = ["AndroidWorldEnvPool"]


class AndroidWorldEnvPool:
    """Lends devices; ``args`` are slime's, or anything that has ``android_world``. To be used on one event loop."""

    def __init__(self, args: Any = None) -> None:
        self._args = args

    async def acquire(self) -> LeasedDevice:
        """Waits for a device and lends it.

        Raises:
            ConfigError, DeviceError: a setting is wrong, or no device comes up.
        """
        return await lend_device(self._args)

    def release(self, device: LeasedDevice) -> None:
        """Takes a device back, for the next one who waits."""
        device.give_back()

    async def shutdown(self) -> None:
        """Disconnects from the devices; they live on, for others."""
        await close_resources()
