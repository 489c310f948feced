"""Locks on files that last until they are closed or their process is gone."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def try_lock(path: Path) -> IO[str] | None:
    """Returns the lock on a file, which is made where it is not there; None when another has it.

    What the file holds is left to whoever gets the lock.
    """
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
