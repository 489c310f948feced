"""File locks that end when the file is closed or its process exits."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[str] | None:
    """Returns the lock on a file, which is created if missing; None if another process holds it."""
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
