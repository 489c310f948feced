"""What an Android device can do besides showing screens and taking input."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """A capability that some tasks need."""

    CLOCK = "clock"  # its clock can be set without changing another system's clock
    ROOT = "root"  # adb's shell is root, or `adb root` makes it root
    SMS = "sms"  # text messages and calls can be sent to it, by the emulator's console
    ACCESSIBILITY = "accessibility"  # its accessibility tree can be read, by the forwarder or by ``uiautomator``
    RESTORE = "restore"  # its state can be restored between episodes
    GRPC = "grpc"  # it serves the emulator's gRPC interface; then trees are the forwarder's, also of moving screens
