"""Settings of a device pool: size, resources, timeouts, and the factory of its devices."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from slime_plugins.rollout_buffer.devices.settings_section import SettingsSection, refuse_boolean

DEFAULT_LEASE_TIMEOUT_S = 60.0


class PoolKind(StrEnum):
    """Where the devices of a pool run."""

    RAY = "ray"  # in named, detached Ray actors that outlive a runner
    LOCAL = "local"  # in threads of the runner


class WorkerResources(SettingsSection):
    """Resources that each device worker reserves on one node of the Ray cluster; 0 reserves none.

    ``memory`` is in bytes. ``custom`` has resources of your own, named as in ``ray start --resources '{"phone": 8}'``.
    """

    num_cpus: float = Field(default=0.1, ge=0)
    memory: int = Field(default=0, ge=0)
    custom: dict[str, Annotated[float, BeforeValidator(refuse_boolean), Field(gt=0)]] = Field(default_factory=dict)

    def as_ray_names_them(self) -> dict[str, float]:
        """Returns the reserved resources under Ray's names."""
        named = {"CPU": self.num_cpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in named.items() if amount > 0}


class PoolSettings(SettingsSection):
    """Settings of any device pool, times in seconds. Settings of a task type with devices inherit these keys.

    The pool has ``num_workers`` devices and ``spare_devices`` more. ``boots_at_once`` devices boot at the same time,
    their boots at least ``boot_stagger_s`` apart. A boot that fails is repeated after ``boot_pause_s``; after
    ``boot_attempts`` failures in a row the device counts as broken and is tried less often. ``acquire_timeout_s``
    limits the wait for a device, and the ``reset``, ``step`` and ``score`` timeouts limit these calls. A lease that is
    not renewed expires after ``lease_timeout_s``. After ``max_consecutive_faults`` a device is in quarantine for
    ``quarantine_s``. After ``recycle_after_episodes`` episodes its worker is replaced; with None never.
    ``evaluation_share`` is the share of the devices that evaluations get while training waits for devices, too.
    """

    device_pool: PoolKind = PoolKind.RAY
    num_workers: int = Field(default=2, ge=1)
    spare_devices: int = Field(default=0, ge=0)
    resources_per_worker: WorkerResources = WorkerResources()

    boots_at_once: int = Field(default=16, ge=1)
    boot_stagger_s: float = Field(default=0, ge=0)
    boot_attempts: int = Field(default=10, ge=1)
    boot_pause_s: float = Field(default=10, ge=0)
    boot_timeout_s: float = Field(default=300, gt=0)
    acquire_timeout_s: float = Field(default=3600, gt=0)
    reset_timeout_s: float = Field(default=300, gt=0)
    step_timeout_s: float = Field(default=120, gt=0)
    score_timeout_s: float = Field(default=120, gt=0)
    lease_timeout_s: float = Field(default=DEFAULT_LEASE_TIMEOUT_S, gt=0)
    max_consecutive_faults: int = Field(default=3, ge=1)
    quarantine_s: float = Field(default=60, gt=0)
    recycle_after_episodes: int | None = Field(default=None, ge=1)
    evaluation_share: float = Field(default=0.5, gt=0, lt=1)


class DevicePoolSettings(PoolSettings):
    """A pool and its devices.

    ``kind`` is the ``module:function`` of a ``kinds.DeviceKind``, which is called with ``device_options``, plain JSON.
    ``farm`` is the pool's name: pools of different names share only the cluster; one pool per cluster may have an empty
    name. ``prepare`` is empty, or a ``module:function`` that is called with the arguments of ``kind`` before each boot,
    outside of the boot timeout. That function prepares files that the device needs on its host, within its own time
    limits.
    """

    farm: str = Field(default="", pattern=r"^[a-z0-9_]*$")
    kind: str
    device_options: dict[str, Any] = Field(default_factory=dict)
    prepare: str = ""

    @field_validator("kind")
    @classmethod
    def _kind_is_an_address(cls, kind: str) -> str:
        if kind.count(":") != 1:
            raise ValueError("must be module:function")
        return kind
