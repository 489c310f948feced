"""Kinds of devices: factory functions, named by ``module:function`` or by an entry point.

The functions run in the device worker, so that only the worker's process imports their modules.
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
    """Creates device number ``index``, from 0 on, ready for its first ``reset``; may take as long as a boot.

    Raises:
        ConfigError: these options do not work on this host.
        DeviceError: the device did not come up.
    """

    def __call__(self, options: Mapping[str, Any], index: int, /) -> Device[Any]: ...


def create_device(kind: str, options: Mapping[str, Any], index: int) -> Device[Any]:
    """Returns a device of the kind at ``module:function``.

    Raises:
        ConfigError, DeviceError: as ``DeviceKind``; a ConfigError also if there is no such function.
    """
    return cast("DeviceKind", load_kind(kind))(options, index)


def load_kind(address: str) -> Any:
    """Returns the function at ``module:function``, or an installed package's function of that name (``extensions.py``).

    Raises:
        ConfigError: there is no such function, or its import fails.
    """
    module_name, colon, function_name = address.partition(":")
    if not colon:
        return load(Group.DEVICES, address)
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the device factory {address} cannot be loaded: {error}") from error


def misconfigured(message: str) -> DeviceError:
    """Returns the error of a device that cannot boot because of its settings or its host; retries cannot succeed.

    It carries the message of a ``ConfigError`` in a ``DeviceError``, which device calls may raise.
    """
    return DeviceError(message, {"fault": _MISCONFIGURED})


def is_misconfigured(error: Exception) -> bool:
    """Returns True for an error that ``misconfigured`` made, also in another process."""
    return isinstance(error, DeviceError) and error.detail.get("fault") == _MISCONFIGURED
