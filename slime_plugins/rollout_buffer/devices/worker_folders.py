"""Temporary folders of device workers and of the local Ray. A new one removes those of processes that were killed.

The owner of a folder holds a lock on the file ``in_use`` in it; the kernel releases the lock when the process exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.devices.file_locks import try_lock

logger = logging.getLogger(__name__)

_IN_USE = "in_use"


class WorkerFolder:
    """A new folder named ``PREFIX_…``, owned by this process until ``remove``.

    It is made in ``root``, by default the temporary directory. Abandoned folders of that prefix are removed, and if it
    ends with a device's index, those of all indices.
    """

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        root = root or Path(tempfile.gettempdir())
        with (root / f".{prefix.rstrip('0123456789')}.{os.getuid()}.lock").open("w") as creation_lock:
            # Held from creation to lock: another worker would remove a folder that is created and not yet locked.
            fcntl.flock(creation_lock, fcntl.LOCK_EX)
            _remove_abandoned(root, prefix.rstrip("0123456789"))
            self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}_", dir=root))
            self._lock: IO[str] | None = try_lock(self.path / _IN_USE)

    def remove(self) -> None:
        """Removes the folder; a second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            lock.close()


def _remove_abandoned(root: Path, prefix: str) -> None:
    for path in (*root.glob(f"{prefix}[0-9]*_*"), *root.glob(f"{prefix}_????????")):
        with contextlib.suppress(FileNotFoundError):  # the folder's owner may remove it at the same time
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                continue
            lock = try_lock(path / _IN_USE)
            if lock is not None:
                logger.info("removing %s of a worker that is gone", path)
                shutil.rmtree(path, ignore_errors=True)
                lock.close()
