"""The data directory: on a local disk, readable by its user only, owned by one supervisor at a time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.errors import ConfigError

DATABASE = "buffer.sqlite3"
APPLICATION_ID = int.from_bytes(b"RBuf")
"""The ``application_id`` in the header of the database. Databases from before 0.1.0 do not have it."""
OWNER_LOCK = "supervisor.lock"
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "ceph", "glusterfs"})
OUR_FILES = (
    f"{DATABASE}*",
    "writer.*",
    OWNER_LOCK,
    "reserve",
    "clock",
    "children.*",
    "ray_*",
    "gateway*",
    "packs/*.pack",
    "logs/*",
)
"""Patterns of the files of a data directory. The permissions of other files are not changed."""
RUNNER_LOG = "logs/runner-{}.log"
"""The log of a job's runner; ``{}`` is the key of the job."""
OWNERSHIP_TIMEOUT_S = 2.0
"""Time in which the lock must become free: a command that opens the store may hold it briefly."""

logger = logging.getLogger(__name__)


def prepare(data_dir: Path) -> None:
    """Creates the directory if it is missing, with permissions for its user only.

    Raises:
        ConfigError: the path is a file, or the directory is on a network file system, shared by all users, or written
            before 0.1.0.
    """
    _refuse_older_database(data_dir)
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--data-dir {data_dir} is a file, or lies below one: give a folder") from error
    _refuse_network_file_system(data_dir)
    mode = data_dir.stat().st_mode
    if mode & stat.S_ISVTX:
        raise ConfigError(f"--data-dir {data_dir} is shared by all users: give a folder of its own inside it")
    if mode & 0o077 and _holds_only_our_files(data_dir):
        _close_to_others(data_dir, 0o700)


def restrict_permissions(data_dir: Path) -> None:
    """Removes other users' permissions, which a copy may have added; warns if others can still list the folder."""
    for pattern in OUR_FILES:
        for path in data_dir.glob(pattern):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                _close_to_others(path, stat.S_IMODE(mode) & 0o700)
    if data_dir.stat().st_mode & 0o077:
        logger.warning("other users of this machine may list %s, whose mode is not changed because it holds other "
                       "files too: use a folder of its own", data_dir)  # fmt: skip


def _holds_only_our_files(data_dir: Path) -> bool:
    names = [pattern.partition("/")[0] for pattern in OUR_FILES]
    return all(any(fnmatch(path.name, name) for name in names) for path in data_dir.iterdir())


def remove_unused(data_dir: Path) -> None:
    """Removes the directory if it contains nothing but the lock."""
    if [path.name for path in data_dir.iterdir()] == [OWNER_LOCK]:
        (data_dir / OWNER_LOCK).unlink()
        data_dir.rmdir()


def acquire_ownership(data_dir: Path) -> IO[bytes]:
    """Acquires the supervisor's lock on the directory, before anything in it is opened or changed.

    Closing the file releases it; the kernel does so when the process dies.

    Raises:
        ConfigError: another supervisor holds it.
    """
    prepare(data_dir)
    descriptor = open_lock_file(data_dir / OWNER_LOCK)
    if not lock_within(descriptor, OWNERSHIP_TIMEOUT_S):
        os.close(descriptor)
        raise ConfigError(f"another rollout-buffer serve uses {data_dir}: stop it, or give another --data-dir")
    return os.fdopen(descriptor, "rb")


def lock_within(descriptor: int, timeout_s: float) -> bool:
    """Locks a file; returns False if another process holds it for longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def is_owned(data_dir: Path) -> bool:
    """Returns True if a running supervisor, of this process or another, holds the directory's lock."""
    descriptor = open_lock_file(data_dir / OWNER_LOCK)
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def open_lock_file(path: Path) -> int:
    """Opens or creates a file that processes lock or share; opens it for reading on a read-only file system.

    Raises:
        OSError: it cannot be created or opened.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file until it is closed or unlocked; returns False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_to_others(path: Path, mode: int) -> None:
    try:
        path.chmod(mode)
    except OSError as error:
        logger.warning("other users of this machine may read %s, and its mode cannot be changed: %s", path, error)
    else:
        logger.warning("other users of this machine could read %s; their permissions were removed", path)


def _refuse_older_database(data_dir: Path) -> None:
    """Refuses a database written before 0.1.0, by its header; creates and changes nothing.

    Raises:
        ConfigError: the database was written before 0.1.0.
    """
    try:
        with (data_dir / DATABASE).open("rb") as file:
            header = file.read(100)
    except OSError:
        return  # missing, or opening it later raises a precise error
    if header.startswith(b"SQLite format 3\0") and int.from_bytes(header[68:72]) != APPLICATION_ID:
        raise ConfigError(
            f"{data_dir} was written by a version before 0.1.0. This version cannot read it and does not change it: "
            "give another --data-dir; only the version that wrote the directory can serve it"
        )


def _refuse_network_file_system(folder: Path) -> None:
    """Refuses network file systems: SQLite's locks are unreliable there, so the database could be corrupted.

    Raises:
        ConfigError: the folder is on a network file system.
    """
    kind = _file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(f"--data-dir {folder} is on a network file system ({kind}): use a folder on a local disk")


def _file_system_of(folder: Path) -> str:
    """Returns the kind of the file system that has the deepest mount point above a folder; "" if unknown."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    deepest, kind = "", ""
    for line in mounts:
        fields = line.split()
        mount_point = fields[1].replace("\\040", " ")
        if len(mount_point) >= len(deepest) and folder.is_relative_to(mount_point):
            deepest, kind = mount_point, fields[2]
    return kind
