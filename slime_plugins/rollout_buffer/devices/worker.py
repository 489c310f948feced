"""The object in a device worker's process: one device, which refuses calls under a lease that has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.devices.interface import Action, Device, Observation, ReportsLoss
from slime_plugins.rollout_buffer.devices.kinds import create_device, load_kind, misconfigured
from slime_plugins.rollout_buffer.devices.leased_device import device_died
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EpisodeError

logger = logging.getLogger(__name__)

_LOSS_POLL_S = 1.0
_Result = TypeVar("_Result")


class DeviceWorker:
    """Owns one device. Its caller makes one call at a time; calls under an older lease than the newest are refused.

    Methods raise ``EpisodeError`` only: any other error of a device becomes a ``DeviceError``, with its traceback in
    this worker's log.
    """

    def __init__(self, settings: DevicePoolSettings, index: int) -> None:
        self._settings = settings
        self._index = index
        self._device: Device[Any] | None = None
        self._given_up = ""
        self._lease_id = 0
        self._watched_lease_id = 0

    def prepare(self) -> None:
        """Prepares the device's files on this host."""
        settings = self._settings
        if settings.prepare:
            self._guarded(lambda: load_kind(settings.prepare)(settings.device_options, self._index))

    def boot(self) -> None:
        """Creates the device; returns when it can be used."""
        self._device = self._guarded(
            lambda: create_device(self._settings.kind, self._settings.device_options, self._index)
        )

    def check_health(self) -> frozenset[str] | None:
        """Returns the capabilities that a healthy device names; None if it names none."""
        named = self._guarded(self._booted().health).get("capabilities")
        return None if named is None else frozenset(named.split())

    def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation:
        """As ``Device.reset``; later calls need ``lease_id``."""
        if lease_id < self._lease_id:
            raise _lease_expired()
        self._lease_id = lease_id
        return self._guarded(lambda: self._booted().reset(task_name, params_idx))

    def step(self, lease_id: int, action: Action) -> Observation:
        return self._guarded(lambda: self._leased(lease_id).step(action))

    def score(self, lease_id: int) -> float:
        return self._guarded(lambda: float(self._leased(lease_id).score()))

    def lost(self, lease_id: int, wait_s: float) -> str:
        """Returns the reason as soon as the device is lost; "" after ``wait_s``, or once a newer lease is watched.

        Only this call may be made during another call.
        """
        self._watched_lease_id = max(self._watched_lease_id, lease_id)
        deadline = time.monotonic() + wait_s
        while lease_id >= self._watched_lease_id:
            if (why := self._why_lost()) or time.monotonic() >= deadline:
                return why
            time.sleep(_LOSS_POLL_S)
        return ""

    def give_up(self, reason: str) -> None:
        """Reports the device as lost with this reason; later calls raise it."""
        self._given_up = reason

    def close(self) -> None:
        """Closes the device; a second call does nothing."""
        device, self._device = self._device, None
        if device is not None:
            self._guarded(device.close)

    def _why_lost(self) -> str:
        device: object = self._device
        return self._given_up or (self._guarded(device.lost) if isinstance(device, ReportsLoss) else "")

    def _booted(self) -> Device[Any]:
        if self._given_up:
            raise device_died(self._given_up)
        if self._device is None:
            raise DeviceError("the device worker has no device: it was not booted, or is closed")
        return self._device

    def _leased(self, lease_id: int) -> Device[Any]:
        if lease_id != self._lease_id:
            raise _lease_expired()
        return self._booted()

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except EpisodeError:
            raise
        except ConfigError as error:
            raise misconfigured(f"device {self._index} cannot be created: {error.message}") from error
        except Exception as error:  # boundary to device code: emulators, adb, phones
            logger.exception("device %d failed", self._index)
            raise DeviceError(f"device {self._index} failed: {type(error).__name__}: {error}") from error


def _lease_expired() -> DeviceError:
    return DeviceError("the lease expired: the device now belongs to another episode")
