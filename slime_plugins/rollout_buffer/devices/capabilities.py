"""What an Android device can do besides showing screens and taking input."""

from __future__ import annotations

from enum import StrEnum


class Capability(StrEnum):
    """A capability that some tasks need."""

    CLOCK = "clock"  # its clock can be set without changing another system's clock
    ROOT = "root"  # adb's shell is root, or can become root
    SMS = "sms"  # text messages and calls can be sent to it, by the emulator's console
    ACCESSIBILITY = "accessibility"  # its accessibility forwarder can reach the device worker
    RESTORE = "restore"  # its state can be restored between episodes
    GRPC = "grpc"  # it serves the emulator's gRPC interface
