"""Kinds of devices: each is a function, found at ``module:function`` or by the name that a package gave it.

Called in the device worker, so that what a kind imports is loaded there and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.extensions import Group, load

_MISCONFIGURED = "misconfigured"


class DeviceKind(Protocol):
    """Makes device number ``index``, from 0 on, ready for its first ``reset``; may take as long as a device takes to
    boot.

    Raises:
        ConfigError: no such device can be made with these options here.
        DeviceError: the device did not come up.
    """

    def __call__(self, options: Mapping[str, Any], index: int, /) -> Device[Any]: ...


def create_device(kind: str, options: Mapping[str, Any], index: int) -> Device[Any]:
    """Returns a device of the kind at ``module:function``.

    Raises:
        ConfigError, DeviceError: as ``DeviceKind``; ConfigError also when there is no such function.
    """
    return cast("DeviceKind", load_kind(kind))(options, index)


def load_kind(address: str) -> Any:
    """Returns the function at ``module:function``, or the one that an installed package calls so (``extensions.py``).

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    module_name, colon, function_name = address.partition(":")
    if not colon:
        return load(Group.DEVICES, address)
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the device factory {address} cannot be loaded: {error}") from error


def misconfigured(message: str) -> DeviceError:
    """Returns the error of a device that no further attempt brings up, because its settings or its host lack something.

    Says the same as a ``ConfigError``, in a form that calls of devices may raise.
    """
    return DeviceError(message, {"fault": _MISCONFIGURED})


def is_misconfigured(error: Exception) -> bool:
    """Returns True if the error, which may come from another process, is one of ``misconfigured``."""
    return isinstance(error, DeviceError) and error.detail.get("fault") == _MISCONFIGURED
