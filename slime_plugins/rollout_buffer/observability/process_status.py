"""Reads ``/proc``: the status of processes, and the boot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStatus:
    """State, parent, session and start time of a process."""

    state: str
    """R, S, D (waits for the disk), T (stopped), t (stopped by a debugger), Z, X …"""
    parent: int
    session: int
    started: int
    """Clock ticks since boot; with the process id, unique."""
    cpu_ticks: int
    """Processor time, in clock ticks."""

    @property
    def lives(self) -> bool:
        """Returns True if it has not exited."""
        return self.state not in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Returns True if it is stopped, by SIGSTOP or a debugger."""
        return self.state in "Tt"


def process_status(pid: int) -> ProcessStatus | None:
    """Returns the status of a process; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return ProcessStatus(
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
    )


def all_process_statuses() -> list[tuple[int, ProcessStatus]]:
    """Returns all processes with their ids."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [(pid, status) for pid in pids if (status := process_status(pid)) is not None]


def boot_id() -> str:
    """Returns the id of the machine's present boot, a uuid; empty if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
