"""Translates errors of SQLite and of the file system into the buffer's errors, with advice."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from pathlib import Path

from slime_plugins.rollout_buffer.errors import (
    DatabaseDamagedError,
    RolloutBufferError,
    StorageFullError,
    UnavailableError,
)

FULL_BYTES = 64 * 1024
"""An error of SQLite on a file system with less free space than this is reported as a full disk."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_BROKEN = frozenset({errno.EIO, errno.EUCLEAN, errno.ENXIO, errno.ENODEV})
_NO_RESOURCES = {
    errno.EMFILE: "the process may open no more files: raise its limit (ulimit -n)",
    errno.ENFILE: "the machine may open no more files: raise fs.file-max",
    errno.ENOMEM: "the machine is out of memory",
}


class StorageErrors:
    """Context manager that translates errors of SQLite and of the file system; other errors pass unchanged.

    A class, because a generator-based context manager is slower.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if _is_garbled(error):
            raise database_damaged_error(error, self._data_dir) from error
        if (
            isinstance(error, sqlite3.Error | OSError)
            and (translated := storage_error(error, self._data_dir)) is not None
        ):
            raise translated from error


def _is_garbled(error: BaseException | None) -> bool:
    """Returns True if stored text or JSON could not be decoded."""
    if isinstance(error, sqlite3.OperationalError):  # has no error code in Python's module
        return str(error).startswith("Could not decode to UTF-8")
    return isinstance(error, UnicodeDecodeError | json.JSONDecodeError)


def storage_error(error: sqlite3.Error | OSError, data_dir: Path) -> RolloutBufferError | None:
    """Returns the buffer's error for an error of SQLite or of the file system; None if there is none for it."""
    if isinstance(error, OSError):
        return _disk_error(error, data_dir)
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else _database_error(error, code & 0xFF, data_dir)


def disk_full_error(data_dir: Path, why: object) -> StorageFullError:
    """Returns the error for a full disk."""
    return StorageFullError(
        f"the disk under {data_dir} is full ({why}): make room, or let delivered payloads be purged with "
        "--retain-delivered-s; what was acknowledged is safe"
    )


def _disk_error(error: OSError, data_dir: Path) -> RolloutBufferError | None:
    if error.errno in _FULL:
        return disk_full_error(data_dir, error.strerror)
    if error.errno == errno.EROFS:
        return _read_only_error(data_dir)
    if error.errno in _BROKEN:
        return _broken_disk_error(data_dir, error)
    if error.errno in _NO_RESOURCES:
        return UnavailableError(f"the store cannot be used now: {_NO_RESOURCES[error.errno]}")
    return None


def _database_error(error: sqlite3.Error, code: int, data_dir: Path) -> RolloutBufferError | None:
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return UnavailableError(f"the store is busy: {error}")
    if code == sqlite3.SQLITE_FULL:
        return disk_full_error(data_dir, error)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return database_damaged_error(error, data_dir)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return _access_error(error, data_dir)
    return None


def database_damaged_error(error: object, data_dir: Path) -> DatabaseDamagedError:
    """Returns the error for a damaged database."""
    return DatabaseDamagedError(
        f"the database {data_dir / 'buffer.sqlite3'} is damaged ({str(error)[:200]}): stop the service, keep a copy of "
        f"{data_dir}, and go on with a backup or another --data-dir; docs/troubleshooting.md says what can be saved"
    )


def _access_error(error: sqlite3.Error, data_dir: Path) -> RolloutBufferError:
    """Returns the error for a failed access. SQLite has one code for several causes, so the file system is examined."""
    try:
        file_system = os.statvfs(data_dir)
    except OSError as failure:
        return UnavailableError(f"the data directory {data_dir} cannot be reached: {failure.strerror}")
    if file_system.f_flag & os.ST_RDONLY:
        return _read_only_error(data_dir)
    if file_system.f_bavail * file_system.f_frsize < FULL_BYTES:
        return disk_full_error(data_dir, error)
    return _broken_disk_error(data_dir, error)


def _read_only_error(data_dir: Path) -> UnavailableError:
    return UnavailableError(
        f"the file system of {data_dir} is read-only: the kernel does this after errors of the disk; look at dmesg, "
        "repair the disk and mount the file system read-write again"
    )


def _broken_disk_error(data_dir: Path, error: object) -> UnavailableError:
    return UnavailableError(
        f"the disk under {data_dir} does not work ({error}): look at dmesg and at the rights of the files there; what "
        "was acknowledged stays where it is"
    )
