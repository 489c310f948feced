"""Room on the disk that is kept for small writes: on a full disk acknowledgements and leases are still recorded.

The reserve is a file that takes its place on the disk from the start. When the disk is nearly full it is emptied. From
then on, until there is room for it again, only what moves the state of the service is written, into the place that it
left; trajectories and new jobs are refused.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slime_plugins.rollout_buffer.errors import StorageFullError
from slime_plugins.rollout_buffer.storage.storage_errors import disk_is_full

FILE_NAME = "reserve"
RESERVE_BYTES = 16 * 1024 * 1024
MIN_SHARE = 16
"""On a small disk the reserve is at most one part in so many of it."""

logger = logging.getLogger(__name__)


class DiskReserve:
    """The reserve of a data directory. Every process may empty it; its supervisor fills it again."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._path = data_dir / FILE_NAME
        self._folder, self._name = str(data_dir), str(self._path)
        found = os.statvfs(data_dir)
        self._size = min(RESERVE_BYTES, found.f_blocks * found.f_frsize // MIN_SHARE)
        self._least_free = self._size // 4
        """With less free than this the disk counts as full."""

    def keep(self) -> bool:
        """Takes the place that the reserve needs, when there is so much; returns whether it is there."""
        if self._kept_bytes() >= self._size:
            return True
        if self.free_bytes() < self._size + 2 * self._least_free:
            self._touch()
            return False
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as error:
            os.ftruncate(descriptor, 0)
            logger.warning("no room is kept for a full disk: %s", error)
            return False
        finally:
            os.close(descriptor)
        return True

    def is_used(self) -> bool:
        """Returns True if small writes live on the reserve; on a disk that has just become full it is emptied here."""
        kept = self._kept_bytes()
        if kept > 0 and self.free_bytes() < self._least_free:
            os.truncate(self._path, 0)
            logger.error("%s: room that was kept is now used for what must be recorded", self.why_full())
            return True
        return kept == 0

    def check(self) -> None:
        """Raises ``StorageFullError`` when only small writes have room."""
        kept, free = self._kept_bytes(), self.free_bytes()
        if kept == 0 or free < self._least_free:
            self.is_used()
            raise self.why_full()

    def why_full(self) -> StorageFullError:
        """Returns what is said while only small writes have room."""
        return disk_is_full(self._data_dir, f"{self.free_bytes()} bytes are free, and kept for polls and acks")

    def free_bytes(self) -> int:
        """Returns how much an ordinary user may still write."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize

    def _kept_bytes(self) -> int:
        """How large the file is: 0 once it was emptied, -1 where no supervisor ever kept one."""
        try:
            return os.stat(self._name).st_size  # asked before every write: a path object takes three times as long
        except FileNotFoundError:
            return -1

    def _touch(self) -> None:
        """An empty file says that there is no room, also to the other processes."""
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))
