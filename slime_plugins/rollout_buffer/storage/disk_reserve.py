"""Disk space reserved for small writes: on a full disk acknowledgements and leases are still recorded.

The reserve is a preallocated file. When the disk is nearly full, it is truncated. From then on, until there is space to
allocate it again, only state changes are written, into the freed space; trajectories and new jobs are refused.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slime_plugins.rollout_buffer.errors import StorageFullError
from slime_plugins.rollout_buffer.storage.storage_errors import disk_full_error

FILE_NAME = "reserve"
RESERVE_BYTES = 16 * 1024 * 1024
DISK_DIVISOR = 16
"""The reserve takes at most 1 / ``DISK_DIVISOR`` of the disk."""

logger = logging.getLogger(__name__)


class DiskReserve:
    """The reserve of a data directory. Every process may truncate it; the supervisor allocates it again."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._path = data_dir / FILE_NAME
        self._path_text = str(self._path)  # for the call before every write: a path object takes three times as long
        disk = os.statvfs(data_dir)
        self._size = min(RESERVE_BYTES, disk.f_blocks * disk.f_frsize // DISK_DIVISOR)
        self._least_free = self._size // 4
        """Bytes; a disk with less free space counts as full."""

    def allocate(self) -> bool:
        """Allocates the reserve if there is enough space; returns True if it is allocated."""
        if self._reserved_bytes() >= self._size:
            return True
        has_room = self.free_bytes() >= self._size + 2 * self._least_free  # with less, it would soon be full again
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if not has_room:
                return False  # a file of 0 bytes means that the disk is full
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError as error:
            os.ftruncate(descriptor, 0)
            logger.warning("no disk space could be reserved for acknowledgements on a full disk: %s", error)
            return False
        finally:
            os.close(descriptor)
        return True

    def release_if_full(self) -> bool:
        """Truncates the reserve on a full disk; returns True if it is truncated, so that small writes use its space."""
        reserved = self._reserved_bytes()
        if reserved > 0 and self.free_bytes() < self._least_free:
            os.truncate(self._path, 0)
            logger.error("%s: polls and acknowledgements now use the reserved space", self.full_error())
            return True
        return reserved == 0

    def check(self) -> None:
        """Checks that there is space for large writes.

        Raises:
            StorageFullError: there is space for small writes only.
        """
        reserved, free = self._reserved_bytes(), self.free_bytes()
        if reserved == 0 or free < self._least_free:
            self.release_if_full()
            raise self.full_error()

    def full_error(self) -> StorageFullError:
        """Returns the error for a disk with space for small writes only."""
        return disk_full_error(self._data_dir, f"{self.free_bytes()} bytes are free, reserved for polls and acks")

    def free_bytes(self) -> int:
        """Returns the bytes that an ordinary user may still write."""
        disk = os.statvfs(self._data_dir)
        return disk.f_bavail * disk.f_frsize

    def _reserved_bytes(self) -> int:
        """Returns the size of the file: 0 after it was truncated, -1 if no supervisor has allocated it."""
        try:
            return os.stat(self._path_text).st_size
        except FileNotFoundError:
            return -1
