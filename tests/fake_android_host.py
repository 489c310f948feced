"""An ``AndroidHost`` without Android, for tests of whatever holds one: it records its calls and breaks on demand."""

from __future__ import annotations

from collections.abc import Collection

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint

ENDPOINT = AndroidEndpoint(
    serial="fake-0",
    adb_path="/bin/false",
    adb_server_port=5037,
    console_port=5554,
    grpc_port=8554,
    capabilities=frozenset(Capability),
)


class FakeAndroidHost:
    """``broken`` is the reason for which Android does not answer; ``moved`` makes the next call report a reconnect."""

    def __init__(self, endpoint: AndroidEndpoint = ENDPOINT) -> None:
        self.endpoint = endpoint
        self.calls: list[str] = []
        self.broken = ""
        self.moved = False
        self._is_up = False

    def start(self) -> AndroidEndpoint:
        self.calls.append("start")
        if self.broken:
            raise DeviceError(self.broken)
        self._is_up = True
        return self.endpoint

    def check_alive(self) -> bool:
        if self.broken or not self._is_up:
            raise DeviceError(self.broken or "the fake host is not started")
        is_unchanged, self.moved = not self.moved, False
        return is_unchanged

    def restore(self, packages: Collection[str]) -> bool:
        self.calls.append(" ".join(["restore", *packages]))
        return self.check_alive()

    def lost(self) -> str:
        return self.broken if self._is_up else ""

    def close(self) -> None:
        if self._is_up:
            self.calls.append("close")
        self._is_up = False
