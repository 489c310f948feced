"""Who uses a virtual device of this host: one emulator at a time, whoever started it.

The emulator's own lock files cannot say it: they stay behind when one is killed, and then keep every other from
starting, so that they have to be removed. Only who owns the device may do that, boot it, or copy into it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from slime_plugins.rollout_buffer.devices.file_locks import try_lock
from slime_plugins.rollout_buffer.errors import DeviceError


class AvdOwnership:
    """Holds a virtual device until it is released, or every process has ended that inherited ``fileno``.

    It is a lock of the kernel on a file beside the device's folder, so that it ends with its holders however they
    end. The file says for people who that is: pid, start time in clock ticks since boot, and checkout.
    """

    def __init__(self, avd_home: Path, name: str, checkout: Path) -> None:
        """Takes the device.

        Raises:
            DeviceError: somebody else has it.
        """
        path = avd_home / f".{name}.owner"
        lock = try_lock(path)
        if lock is None:
            owner = path.read_text(encoding="utf-8").strip() or "a process that is just taking it"
            raise DeviceError(
                f"the virtual device {name} is in use by {owner}: end that, or set another base_avd_name_pattern"
            )
        start = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        lock.truncate(0)
        lock.write(f"process {os.getpid()} (started at tick {start}) of {checkout}\n")
        lock.flush()
        self._lock = lock

    def fileno(self) -> int:
        """Returns what a process inherits that holds the device as well."""
        return self._lock.fileno()

    def release(self) -> None:
        """Gives the device up, for everybody who inherited it."""
        # Closing the file is not enough: a child that this process starts just now has it until it runs its program.
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()

    def __enter__(self) -> AvdOwnership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
