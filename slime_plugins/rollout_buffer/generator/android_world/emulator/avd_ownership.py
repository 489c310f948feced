"""Locks a virtual device of this host for one emulator at a time.

The emulator's own lock files stay behind when it is killed, and then prevent every later start, so they have to be
removed. Only the owner of the device may remove them, boot the device, or copy into it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from slime_plugins.rollout_buffer.devices.file_locks import try_lock
from slime_plugins.rollout_buffer.errors import DeviceError


class AvdOwnership:
    """Owns a virtual device until it is released, or every process that inherited ``fileno`` has exited.

    Ownership is a kernel lock on a file next to the device's folder, so it ends with the owning processes even if they
    are killed. For error messages the file holds the owner's pid, its start time in clock ticks since boot, and its
    checkout.
    """

    def __init__(self, avd_home: Path, name: str, checkout: Path) -> None:
        """Locks the device.

        Raises:
            DeviceError: another process owns the device.
        """
        path = avd_home / f".{name}.owner"
        lock = try_lock(path)
        if lock is None:
            owner = path.read_text(encoding="utf-8").strip() or "a process that is just taking it"
            raise DeviceError(
                f"the virtual device {name} is in use by {owner}: stop that, or set another base_avd_name_pattern"
            )
        start = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        lock.truncate(0)
        lock.write(f"process {os.getpid()} (started at tick {start}) of {checkout}\n")
        lock.flush()
        self._lock = lock

    def fileno(self) -> int:
        """Returns the file descriptor of the lock, for child processes that share it."""
        return self._lock.fileno()

    def release(self) -> None:
        """Releases the device for all processes that inherited the lock."""
        # Closing the file is not enough: a child that is just being started has it open until it executes its program.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()

    def __enter__(self) -> AvdOwnership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
