"""What a farm of devices is told: how many, on what, with which timeouts, and how its devices are made."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from slime_plugins.rollout_buffer.devices.settings_section import SettingsSection, no_truth_value


class PoolKind(StrEnum):
    """Where the devices live."""

    RAY = "ray"  # in named, detached Ray actors that outlive a runner
    LOCAL = "local"  # in threads of the runner


class WorkerResources(SettingsSection):
    """What each device worker reserves of one node of the Ray cluster; ``memory`` in bytes, 0 for none.

    ``custom`` names resources of your own, as in ``ray start --resources '{"phone": 8}'``.
    """

    num_cpus: float = Field(default=0.1, ge=0)
    memory: int = Field(default=0, ge=0)
    custom: dict[str, Annotated[float, BeforeValidator(no_truth_value), Field(gt=0)]] = Field(default_factory=dict)

    def as_ray_names_them(self) -> dict[str, float]:
        """Returns what is reserved, by the names under which a node's resources are listed."""
        named = {"CPU": self.num_cpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in named.items() if amount > 0}


class PoolSettings(SettingsSection):
    """What a host decides about any farm. Settings of a task with devices inherit these keys beside their own."""

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
    lease_timeout_s: float = Field(default=60, gt=0)
    max_consecutive_faults: int = Field(default=3, ge=1)
    quarantine_s: float = Field(default=60, gt=0)
    recycle_after_episodes: int | None = Field(default=None, ge=1)
    evaluation_share: float = Field(default=0.5, gt=0, lt=1)


class DevicePoolSettings(PoolSettings):
    """A farm and the devices in it.

    ``kind`` is ``module:function``, a ``kinds.DeviceKind``; it is called with ``device_options``, plain JSON. Farms of
    different names share a cluster and nothing else; one on a cluster may do without a name.

    ``prepare`` is empty, or the ``module:function`` that is called like the kind, before each boot and outside of the
    boot's limit: what a device needs on its host, made once, under limits of its own.
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
