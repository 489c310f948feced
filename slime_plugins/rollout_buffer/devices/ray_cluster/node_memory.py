"""Watches the memory of a node, so that a device is given up before Ray kills all workers of the node.

Above ``RAY_memory_usage_threshold`` (0.95) Ray's memory monitor kills workers, the newest first, until enough memory is
free. It kills the process of a worker and not its emulator, which ends some seconds later. Meanwhile it kills further
workers, and finally the device manager.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.devices.file_locks import try_lock

_MARGIN = 0.05
"""Share of the node's memory below Ray's threshold at which a device is given up."""
_RAY_THRESHOLD = "RAY_memory_usage_threshold"
_POLL_S = 1.0
_FREEING_S = 10.0
"""Time until the memory of a device that was given up is free: its emulator ends later than its worker."""
_CGROUP = Path("/sys/fs/cgroup")


def used_share() -> float:
    """Returns the used share of this node's memory, or of its container's, as Ray computes it."""
    meminfo = _numbers(Path("/proc/meminfo"))
    total, used = meminfo["MemTotal:"] * 1024, (meminfo["MemTotal:"] - meminfo["MemAvailable:"]) * 1024
    try:
        limit, current = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        files = _numbers(_CGROUP / "memory.stat")
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return used / total
    return (current - files["inactive_file"] - files["active_file"]) / limit if limit < total else used / total


def shortage() -> str:
    """Returns a sentence if the node is about to run out of memory, "" otherwise."""
    threshold = float(os.environ.get(_RAY_THRESHOLD, "0.95"))
    share = used_share()
    if share < threshold - _MARGIN:
        return ""
    return (
        f"the node's memory is {share:.0%} in use, and Ray kills workers above {threshold:.0%}: "
        "place fewer devices on it, by a larger resources_per_worker.memory"
    )


def wait_for_shortage() -> tuple[str, IO[str]]:
    """Blocks until memory is short and no other worker of this node is giving its device up.

    Returns the reason, and a lock that the caller closes once the memory is free again.
    """
    while True:
        time.sleep(_POLL_S)
        if not shortage():
            continue
        # Not tempfile.gettempdir(): each device worker has its own temporary folder.
        lock = try_lock(Path(f"/tmp/rollout_buffer_memory_{os.getuid()}.lock"))
        if lock is None:
            continue
        lock_file = os.fstat(lock.fileno())
        is_freeing = lock_file.st_size > 0 and time.time() < lock_file.st_mtime + _FREEING_S
        if not is_freeing and (why := shortage()):  # another worker may have freed memory since the first check
            lock.write(".")  # sets the file's modification time, which the other workers compare
            lock.flush()
            return why, lock
        lock.close()


def _numbers(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text().splitlines())}
