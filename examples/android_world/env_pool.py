"""The device pool of this process, under the name of the guides; shared by all episodes on an event loop."""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.devices.leased_device import LeasedDevice
from slime_plugins.rollout_buffer.generator.android_world.custom_generate import close_resources, lend_device

__all__ = ["AndroidWorldEnvPool"]


class AndroidWorldEnvPool:
    """Leases devices; ``args`` are slime's, or any object with ``android_world``. Use it on one event loop."""

    def __init__(self, args: Any = None) -> None:
        self._args = args

    async def acquire(self) -> LeasedDevice:
        """Waits for a device and leases it.

        Raises:
            ConfigError, DeviceError: a setting is invalid, or no device came up.
        """
        return await lend_device(self._args)

    def release(self, device: LeasedDevice) -> None:
        """Returns a device to the pool."""
        device.give_back()

    async def shutdown(self) -> None:
        """Disconnects from the devices; they continue for other users."""
        await close_resources()
