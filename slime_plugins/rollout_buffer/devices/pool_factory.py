"""Creates the device pool that the settings name: local, or on a Ray cluster."""

from __future__ import annotations

from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind
from slime_plugins.rollout_buffer.errors import ConfigError


def create_device_pool(settings: DevicePoolSettings, *, job_id: str, ray_address: str | None) -> DevicePool:
    """Returns the pool that the settings name, not started.

    Raises:
        ConfigError: the pool is on Ray, and Ray is not installed or there is no cluster address.
    """
    if settings.device_pool is PoolKind.LOCAL:
        return LocalDevicePool(settings, owner=job_id)
    if ray_address is None:
        raise ConfigError("device_pool: ray needs a Ray cluster, but the server has none; device_pool: local does not")
    return RayDevicePool(settings, ray_address=ray_address, owner=job_id)
