"""The inventory of attached devices, a YAML file with an entry per device, by name: see docs/android_farm.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.settings_section import SettingsSection
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator import config_sources
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StatePart

_OPTIONAL_PORT = Field(default=None, ge=1, le=65535)


class RestoreWay(SettingsSection):
    """How a device is restored: by a snapshot of its emulator, or by a command that its owner wrote."""

    snapshot: str | None = Field(default=None, min_length=1)
    command: list[str] | None = Field(default=None, min_length=1)


def _restore_way(value: Any) -> Any:
    """Returns a value of one of the three forms unchanged; the error for any other value names the forms."""
    if value != "apps" and not (isinstance(value, Mapping) and set(value) in ({"snapshot"}, {"command"})):
        raise ValueError("must be apps, {snapshot: NAME} or {command: [PROGRAM, ARGUMENT, …]}")
    return value


class AttachedDevice(SettingsSection):
    """An entry of the inventory. With ``capabilities`` None they are detected when the device is connected."""

    serial: str = ""
    connect: str = ""
    adb_server: str = "127.0.0.1:5037"
    restore: Annotated[Literal["apps"] | RestoreWay, BeforeValidator(_restore_way)]
    check_restored: list[StatePart] = Field(default_factory=list)
    shares_host_kernel: bool = False
    capabilities: list[Capability] | None = None
    console_port: int | None = _OPTIONAL_PORT
    grpc_port: int | None = _OPTIONAL_PORT

    @field_validator("connect", "adb_server")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if not re.fullmatch(r"[^\s:]+:\d{1,5}", address):
            raise ValueError("must be HOST:PORT")
        # Locks are named by these addresses, so an address must have one spelling.
        return re.sub(r"^localhost:", "127.0.0.1:", address)

    @model_validator(mode="after")
    def _can_be_found(self) -> AttachedDevice:
        if bool(self.serial) == bool(self.connect):
            raise ValueError("needs either serial, as `adb devices` shows it, or connect: HOST:PORT")
        if Capability.GRPC in (self.capabilities or ()) and None in (self.console_port, self.grpc_port):
            raise ValueError("the capability grpc needs console_port and grpc_port")
        return self

    @property
    def listed_as(self) -> str:
        """The serial under which adb lists the device, as far as the inventory knows."""
        return self.serial or self.connect


class Inventory(SettingsSection):
    """Entries by name, in the order of the file."""

    devices: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], AttachedDevice] = Field(min_length=1)

    @model_validator(mode="after")
    def _no_device_is_listed_twice(self) -> Inventory:
        names: dict[tuple[str, str], str] = {}
        for name, device in self.devices.items():
            other = names.setdefault((device.adb_server, device.listed_as), name)
            if other != name:
                raise ValueError(f"{other} and {name} are the same device {device.listed_as}")
        return self


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``device_options`` with the inventory's content in the place of its path, so that every node has it.

    Raises:
        ConfigError: names each mistake with its line.
    """
    unknown = sorted(str(key) for key in options if key != "inventory")
    if unknown or "inventory" not in options:
        not_known = f", not {', '.join(unknown)}" if unknown else ""
        raise ConfigError(f"device_options: device: attached needs inventory, the path of a YAML file{not_known}")
    inventory = options["inventory"]  # a path, or the content that this function returned before
    if isinstance(inventory, str):
        path = Path(inventory).expanduser()
        if not path.is_absolute():
            raise ConfigError(f"device_options.inventory: must be an absolute path, not {inventory!r}")
        layer = config_sources.from_file(path)
    else:
        layer = config_sources.Layer(values={"devices": inventory})
    entries = config_sources.validated(Inventory, layer).devices
    return {
        "inventory": {name: entry.model_dump(mode="json", exclude_defaults=True) for name, entry in entries.items()}
    }


def inventory_of(options: Mapping[str, Any]) -> dict[str, AttachedDevice]:
    """Returns the entries by name; ``options`` are those that ``read_options`` returned."""
    return Inventory.model_validate({"devices": options["inventory"]}).devices
