"""The interface between a device and its host, which starts or reaches the device's Android: emulator or phone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.generator.android_world.adb import AdbServer
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StateCheck

ANIMATIONS = ("window_animation_scale", "transition_animation_scale", "animator_duration_scale")
"""Android's global settings for animations. A host sets them to 0, so that a screen settles soon after an action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AndroidEndpoint:
    """How a running Android is reached.

    ``adb_path`` is the program for all adb commands to it. ``console_port`` and ``grpc_port`` are the emulator's, and
    None without an emulator. ``state`` compares the device's state before each episode; with None nothing is compared.
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
        """True if android_env can connect to the emulator's own ports; otherwise adb alone is used."""
        return self.console_port is not None and self.grpc_port is not None

    def changed_state(self, packages: Collection[str]) -> dict[str, str]:
        """As ``StateCheck.compare``; empty without ``state``."""
        return {} if self.state is None else self.state.compare(self._server, self.serial, packages)

    def put_back(self, changed: Mapping[str, str]) -> dict[str, str]:
        """As ``StateCheck.put_back``; empty without ``state``. Only root can set the clock."""
        sets_clock = self.capabilities >= {Capability.CLOCK, Capability.ROOT}
        return (
            {} if self.state is None else self.state.put_back(self._server, self.serial, changed, sets_clock=sets_clock)
        )

    @property
    def _server(self) -> AdbServer:
        return AdbServer(self.adb_path, f"127.0.0.1:{self.adb_server_port}")


class AndroidHost(Protocol):
    """Starts or finds one Android. Calls come one at a time, but ``lost`` may be called during another call.

    ``testing/android_host_conformance.py`` has its conformance suite.
    """

    def start(self) -> AndroidEndpoint:
        """Returns the endpoint once Android is up. May be called again after a failure or after ``close``.

        Raises:
            ConfigError: the settings or this machine do not allow it; a retry cannot succeed.
            DeviceError: Android did not come up; everything that was started has been stopped.
        """
        ...

    def check_alive(self) -> bool:
        """Returns True if Android answers, False if it answers only after a reconnect, which ends connections to it.

        Raises:
            DeviceError: Android does not answer; the message has the reason.
        """
        ...

    def restore(self, packages: Collection[str]) -> bool:
        """Restores the state before an episode that uses these apps, if the host can.

        Returns False if Android was restarted or rolled back, which ends connections to it; else True.

        Raises:
            DeviceError: Android does not answer, or cannot be restored.
        """
        ...

    def lost(self) -> str:
        """Returns why Android is gone although it was not closed, "" while it runs. Does not block."""
        ...

    def close(self) -> None:
        """Stops what ``start`` started; a second call does nothing."""
        ...
