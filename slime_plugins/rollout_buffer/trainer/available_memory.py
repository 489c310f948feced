"""Reads how much memory is available to this process, on the machine and within its control group."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int | None:
    """Returns the bytes available without swapping; None if unknown."""
    known = [left for left in (_of_machine(meminfo), _of_group(control_group)) if left is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    kilobytes = _fields(meminfo).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_group(folder: Path) -> int | None:
    """The group's limit minus its usage, without reclaimable page cache."""
    limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    return max(0, limit - used + _fields(folder / "memory.stat").get("inactive_file", 0))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
