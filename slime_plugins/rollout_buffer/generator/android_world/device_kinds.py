"""The kinds of Android devices that the setting ``device`` can name, and what the pool and ``doctor`` use of a kind."""

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

_PACKAGE = "slime_plugins.rollout_buffer.generator.android_world"
_SHIPPED = {"android_world": f"{_PACKAGE}.emulator.kind:KIND", "attached": f"{_PACKAGE}.attached.kind:KIND"}
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
    """A kind of devices. A plain function (settings, index) → ``Device`` is also a kind, and accepts any options.

    Only ``create`` and ``prepare`` are called in the device worker; the others are called in any process that reads
    settings.
    """

    create: Callable[[AndroidWorldSettings, int], Device[Any]]
    uses_package: bool = False
    """True if ``create`` needs the package ``android_world``: it is called under ``android_world_python``, if set."""
    boots_emulators: bool = False
    """True if its hosts need the Android SDK, KVM and room for emulators: ``doctor`` checks them."""
    read_options: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Returns ``device_options`` as JSON, with the content of a file in the place of its path; raises ``ConfigError``.
    A kind without this function accepts no options."""
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}
    """Returns default values, which may depend on the settings that are set."""
    prepare: str = ""
    """``module:function`` that makes a device's files on its host before the boot."""
    check: Callable[[AndroidWorldSettings], None] = lambda _: None
    """Raises ``ConfigError`` for settings that contradict each other; does not look at the host or its devices."""
    examine: Callable[[AndroidWorldSettings], list[DeviceCheck]] = lambda _: []
    """Returns what ``rollout-buffer doctor`` reports about the devices of this host."""

    def __call__(self, settings: AndroidWorldSettings, index: int) -> Device[Any]:
        """Creates device ``index``."""
        return self.create(settings, index)


def kind_of(device: str) -> AndroidKind:
    """Returns the kind that ``device`` names.

    A kind that cannot be imported in this process may exist on the devices' hosts. Such a kind accepts no options, and
    the device worker reports an import error.
    """
    if device in _SHIPPED:
        module, _, name = _SHIPPED[device].partition(":")
        shipped: AndroidKind = getattr(importlib.import_module(module), name)
        return shipped
    # The lab is imported by its devices only; the setting's validator reports a name that no package has.
    if device in OF_THE_LAB[Group.DEVICES] or (":" not in device and device not in installed(Group.DEVICES)):
        return _imported_by_worker(device)
    try:
        loaded = load_kind(device)
    except ConfigError:
        return _imported_by_worker(device)
    return loaded if isinstance(loaded, AndroidKind) else AndroidKind(create=loaded, read_options=dict)


def _imported_by_worker(device: str) -> AndroidKind:
    return AndroidKind(create=lambda settings, index: load_kind(device)(settings, index))


def read_options(device: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a kind, as its ``read_options`` does.

    Raises:
        ConfigError: the kind has no options, or an option is invalid.
    """
    read = kind_of(device).read_options
    if read is not None:
        return read(options)
    if options:
        keys = sorted(map(str, options))
        raise ConfigError(f"{keys} are not accepted: {device} has no options, or cannot be imported on this host")
    return {}
