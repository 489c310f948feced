"""The write lock: one process writes at a time, and the holder's pid is recorded.

SQLite's ``busy_timeout`` sleeps up to 100 ms and is not fair: of seven processes that write continuously, one waited
6 s. This is a file lock that is polled every few milliseconds. A process that waits for it sets a mark, upon which a
process that has taken it again and again for ``MAX_TURN_S`` lets others in first. The kernel releases the lock of a
killed process. A stopped process (SIGSTOP, a debugger, swap) keeps the lock: the others time out with an error that
names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file, try_lock

LOCK_TIMEOUT_S = 8.0
"""Time that a writer waits for the lock. Transactions are much shorter."""
MIN_LOCK_PAUSE_S = 0.0005
MAX_LOCK_PAUSE_S = 0.002
"""Pause between two attempts to take the lock; it doubles each time up to ``MAX_LOCK_PAUSE_S``."""
MAX_TURN_S = 0.02
"""Time after which a process lets others in. Longer: more writes per second; shorter: others wait less."""
_RECORD_BYTES = 64
"""Size of the record of the holder at the start of the lock file; the next byte is the mark of waiting processes."""
_WAITS_FOR_DISK = "D"
_STATES = {"T": "stopped", "t": "stopped by a debugger", _WAITS_FOR_DISK: "waiting for the disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteLockOwner:
    """The living process that holds the lock."""

    pid: int
    started: int
    """Clock ticks since boot: identifies the process together with the pid."""
    held_s: float
    state: str
    """The kernel's process state: R, S, D (waits for the disk), T (stopped) …"""
    cpu_ticks: int
    """Processor time that the process has used, in clock ticks."""

    def __str__(self) -> str:
        doing = f" ({_STATES[self.state]})" if self.state in _STATES else ""
        return f"process {self.pid}{doing} has held the write lock for {self.held_s:.0f} s"


class WriteLock:
    """A mutex between processes and between the threads of each."""

    def __init__(self, folder: Path) -> None:
        self._thread_lock = threading.Lock()
        self._file = open_lock_file(folder / "writer.active")
        status = process_status(os.getpid())
        self._me = f"{os.getpid()} {-1 if status is None else status.started}"
        self._turn_began_at: float | None = None
        """When this process took the lock from another one; None if another may have held it since."""

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Holds the lock for a block.

        Raises:
            UnavailableError: it was not acquired within ``LOCK_TIMEOUT_S``; the message names the holder.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not self._thread_lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise self._busy_error()
        try:
            self._acquire(deadline)
            try:
                yield
            finally:
                self._release()
        finally:
            self._thread_lock.release()

    def owner(self) -> WriteLockOwner | None:
        """Returns the holder; None if the lock is free."""
        try:
            pid, started, since = os.pread(self._file, _RECORD_BYTES, 0).decode("ascii").split()
        except (OSError, ValueError):
            return None
        status = process_status(int(pid))
        if status is None or status.started != int(started):
            return None  # the holder died, and the kernel released the lock
        held_s = max(0.0, time.monotonic() - float(since))
        return WriteLockOwner(
            pid=int(pid), started=int(started), held_s=held_s, state=status.state, cpu_ticks=status.cpu_ticks
        )

    def close(self) -> None:
        """Closes the lock file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _acquire(self, deadline: float) -> None:
        pause_s = MIN_LOCK_PAUSE_S
        began_at = self._turn_began_at
        if began_at is not None and time.monotonic() - began_at > MAX_TURN_S and self._is_marked():
            self._turn_began_at = None
            time.sleep(MAX_LOCK_PAUSE_S)
        while not try_lock(self._file):
            self._turn_began_at = None
            if time.monotonic() > deadline:
                raise self._busy_error()
            self._mark(b"1")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOCK_PAUSE_S)
        if self._turn_began_at is None:
            self._turn_began_at = time.monotonic()
            self._mark(b"0")  # this process may have set it; others that wait set it again
        self._record_holder(f"{self._me} {time.monotonic():.3f}")

    def _release(self) -> None:
        self._record_holder("")
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _record_holder(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the holder is not recorded
            os.pwrite(self._file, holder.ljust(_RECORD_BYTES).encode("ascii"), 0)

    def _mark(self, waits: bytes) -> None:
        """Writes whether a process waits for the lock."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, waits, _RECORD_BYTES)

    def _is_marked(self) -> bool:
        return os.pread(self._file, 1, _RECORD_BYTES) == b"1"

    def _busy_error(self) -> UnavailableError:
        owner = self.owner()
        if owner is None:
            return UnavailableError(
                f"the store is busy: the write lock could not be acquired within {LOCK_TIMEOUT_S:.0f} s"
            )
        advice = f": kill -CONT {owner.pid} resumes it" if owner.state in "Tt" else ""
        return UnavailableError(f"the store is busy: {owner}{advice}", {"pid": owner.pid, "held_s": owner.held_s})


class WriteLockWatch:
    """Detects a frozen holder: one that uses no processor time and does not wait for the disk."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._last_seen: tuple[int, int, int] | None = None
        self._since = 0.0

    def is_stuck(self, owner: WriteLockOwner | None) -> bool:
        """Returns True if this holder has held the lock without using processor time for longer than the limit."""
        if owner is None or owner.state == _WAITS_FOR_DISK:
            self._last_seen = None
            return False
        seen = (owner.pid, owner.started, owner.cpu_ticks)
        if seen != self._last_seen:
            self._last_seen, self._since = seen, self._clock()
        return min(owner.held_s, self._clock() - self._since) > self._limit_s
