"""Kinds of Android devices, the values of the setting ``device``: options, defaults, preparation and checks of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.devices.kinds import load_kind
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import OF_THE_LAB, Group, installed

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings

_HERE = "slime_plugins.rollout_buffer.generator.android_world"
_SHIPPED = {"android_world": f"{_HERE}.emulator.kind:KIND", "attached": f"{_HERE}.attached.kind:KIND"}
SHIPPED_KINDS = tuple(_SHIPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCheck:
    """One line of ``rollout-buffer doctor``; ``remedy`` is for a failed check."""

    name: str
    passed: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AndroidKind:
    """A kind of devices. A plain function (settings, index) → ``Device`` is a kind too, which accepts any options.

    ``create`` runs in the device worker, with ``uses_package`` in a process of ``android_world_python``; all else runs
    also in the server. ``read_options`` returns ``device_options`` as plain JSON that needs no file of this host, and
    raises ``ConfigError`` for a mistake; without it the kind accepts no options. ``defaults`` returns values for keys
    that are not set, from those that are. ``prepare`` is the address of a function that makes files on the device's
    host before its boot. ``check`` raises ``ConfigError`` for settings that do not fit together. ``examine`` returns
    this machine's checks for ``rollout-buffer doctor``.
    """

    create: Callable[[AndroidWorldSettings, int], Device[Any]]
    uses_package: bool = False
    boots_emulators: bool = False
    read_options: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    prepare: str = ""
    check: Callable[[AndroidWorldSettings], None] = lambda _: None
    examine: Callable[[AndroidWorldSettings], list[DeviceCheck]] = lambda _: []

    def __call__(self, settings: AndroidWorldSettings, index: int) -> Device[Any]:
        """Creates device ``index``."""
        return self.create(settings, index)


def kind_of(device: str) -> AndroidKind:
    """Returns the kind that ``device`` names.

    A kind by ``module:function`` may exist on the devices' hosts only. One that cannot be imported here accepts no
    options; its device worker reports the import error.
    """
    if device in _SHIPPED:
        module, _, name = _SHIPPED[device].partition(":")
        shipped: AndroidKind = getattr(importlib.import_module(module), name)
        return shipped
    if device in OF_THE_LAB[Group.DEVICES] or (":" not in device and device not in installed(Group.DEVICES)):
        return _loaded_later(device)
    try:
        found = load_kind(device)
    except ConfigError:
        return _loaded_later(device)
    return found if isinstance(found, AndroidKind) else AndroidKind(create=found, read_options=dict)


def _loaded_later(device: str) -> AndroidKind:
    return AndroidKind(create=lambda settings, index: load_kind(device)(settings, index))


def read_options(device: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a kind, as its ``read_options`` does.

    Raises:
        ConfigError: the kind takes none, or there is a mistake in them.
    """
    read = kind_of(device).read_options
    if read is not None:
        return read(options)
    if options:
        keys = sorted(map(str, options))
        raise ConfigError(f"{keys} are not accepted: {device} has no options, or cannot be imported on this host")
    return {}
