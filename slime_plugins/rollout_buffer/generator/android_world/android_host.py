"""The interface between a device and whatever runs or reaches its Android: an emulator of ours, an attached phone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StateCheck

ANIMATIONS = ("window_animation_scale", "transition_animation_scale", "animator_duration_scale")
"""Global settings that a host sets to 0: screens must change only because of actions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AndroidEndpoint:
    """How a running Android is reached.

    ``adb_path`` is the program for all adb commands to it. ``console_port`` and ``grpc_port`` are the emulator's, None
    without an emulator. ``state`` says how the device checks that it is restored before each episode; None: no check.
    """

    serial: str
    adb_path: str
    adb_server_port: int
    console_port: int | None = None
    grpc_port: int | None = None
    capabilities: frozenset[Capability] = frozenset()
    state: StateCheck | None = None

    @property
    def is_emulator(self) -> bool:
        """Whether android_env can connect to the emulator's own ports; otherwise adb alone is used."""
        return self.console_port is not None and self.grpc_port is not None

    def changed_state(self, packages: Collection[str]) -> dict[str, str]:
        """Returns what differs from the device's recorded state, by part: as ``StateCheck.compare``."""
        return {} if self.state is None else self.state.compare(self._server, self.serial, packages)

    def put_back(self, changed: Mapping[str, str]) -> dict[str, str]:
        """Writes recorded settings and the time; returns the parts of ``changed`` that still differ: as
        ``StateCheck.put_back``."""
        sets_clock = self.capabilities >= {Capability.CLOCK, Capability.ROOT}
        return (
            {} if self.state is None else self.state.put_back(self._server, self.serial, changed, sets_clock=sets_clock)
        )

    @property
    def _server(self) -> AdbServer:
        return AdbServer(self.adb_path, f"127.0.0.1:{self.adb_server_port}")


class AndroidHost(Protocol):
    """Starts or finds one Android. Calls come one at a time, but ``lost`` may run during another.

    ``testing/android_host_conformance.py`` has its conformance suite.
    """

    def start(self) -> AndroidEndpoint:
        """Returns the endpoint once Android is up. May be called again after a failure or after ``close``.

        Raises:
            ConfigError: the settings or this machine do not allow it; a retry cannot succeed.
            DeviceError: Android did not come up; nothing that was started is left.
        """
        ...

    def check_alive(self) -> bool:
        """Returns True if Android answers, False if it answers again after a reconnect: connections to it are lost.

        Raises:
            DeviceError: Android does not answer; the message has the reason.
        """
        ...

    def restore(self, packages: Collection[str]) -> bool:
        """Restores the state before an episode that uses these apps, if the host has a way.

        Returns False if Android was restarted or rolled back for it: connections to it are lost.

        Raises:
            DeviceError: it failed.
        """
        ...

    def lost(self) -> str:
        """Returns why Android is gone although it was not closed, "" while it runs. Fast."""
        ...

    def close(self) -> None:
        """Stops what ``start`` started; a second call does nothing."""
        ...
