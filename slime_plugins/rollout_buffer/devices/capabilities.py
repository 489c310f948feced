"""The capabilities of devices besides screens and input, and the tasks that need them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum


class Capability(StrEnum):
    """A capability of an Android device that some tasks need."""

    CLOCK = "clock"  # its clock can be set without changing another system's clock
    ROOT = "root"  # adb's shell is root, or `adb root` makes it root
    SMS = "sms"  # text messages and calls can be sent to it, by the emulator's console
    ACCESSIBILITY = "accessibility"  # its accessibility tree can be read, by the forwarder or by ``uiautomator``
    RESTORE = "restore"  # its state can be restored between episodes
    GRPC = "grpc"  # it serves the emulator's gRPC interface: the forwarder gives its trees, also of moving screens


REFUSED = "refused"
"""The ``fault`` of a device's ``EnvironmentSetupError`` for a task whose needs it does not have."""


def covers(capabilities: frozenset[str] | None, needs: frozenset[str]) -> bool:
    """Returns True if a device with these capabilities can play a task with these needs; None plays any task."""
    return capabilities is None or needs <= capabilities


def unplayable(
    tasks: Mapping[str, frozenset[str]], devices: Iterable[frozenset[str] | None]
) -> dict[str, frozenset[str]]:
    """Returns the tasks that no device can play, with what is missing on the device that lacks least."""
    kinds = set(devices)
    return {
        task: min((needs - (kind or frozenset()) for kind in kinds), key=len, default=needs)
        for task, needs in tasks.items()
        if not any(covers(kind, needs) for kind in kinds)
    }
