"""The write lock: one process writes at a time, and a holder that hangs is known by name.

SQLite's own waiting (``busy_timeout``) sleeps up to 100 ms, and is not fair: of seven processes that write all the
time, one waited 6 s. A file lock that is tried again every few milliseconds lets each write as often as the others.
The kernel frees what a killed process held. A process that is stopped (SIGSTOP, a debugger, swap) keeps the lock: the
others wait no longer than a limit, and are told who it is. One that is stopped while it waits holds nothing.
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
from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file

TURN_TIMEOUT_S = 8.0
"""How long a writer waits for its turn. No transaction of ours takes that long."""
MIN_PAUSE_S = 0.0005
MAX_PAUSE_S = 0.004
"""Between two tries; it doubles from one to the next."""
_RECORD_BYTES = 64
_WAITS_FOR_DISK = "D"
_STATES = {"T": "stopped", "t": "stopped by a debugger", _WAITS_FOR_DISK: "waiting for the disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteLockOwner:
    """The living process that holds the turn."""

    pid: int
    started: int
    """Clock ticks since boot: with the id, it names one process for ever."""
    held_s: float
    state: str
    """What the kernel says it does: R, S, D (waits for the disk), T (stopped) …"""
    cpu_ticks: int
    """How much processor time it has used."""

    def __str__(self) -> str:
        doing = f" ({_STATES[self.state]})" if self.state in _STATES else ""
        return f"process {self.pid}{doing} has held the writers' turn for {self.held_s:.0f} s"


class WriteLock:
    """Lets one process after the other write, and one thread of a process after the other."""

    def __init__(self, folder: Path) -> None:
        self._thread_lock = threading.Lock()
        self._file = open_lock_file(folder / "writer.active")
        self._me = f"{os.getpid()} {_started(os.getpid())}"

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the turn for a block.

        Raises:
            UnavailableError: it did not come in ``TURN_TIMEOUT_S``; the sentence names who holds it.
        """
        deadline = time.monotonic() + TURN_TIMEOUT_S
        if not self._thread_lock.acquire(timeout=TURN_TIMEOUT_S):
            raise self._busy()
        try:
            self._acquire(deadline)
            try:
                yield
            finally:
                self._release()
        finally:
            self._thread_lock.release()

    def owner(self) -> WriteLockOwner | None:
        """Returns who holds the turn; None when nobody does."""
        try:
            pid, started, since = os.pread(self._file, _RECORD_BYTES, 0).decode("ascii").split()
        except (OSError, ValueError):
            return None
        status = process_status(int(pid))
        if status is None or status.started != int(started):
            return None  # it died, and the kernel took the turn from it
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
        pause_s = MIN_PAUSE_S
        while not self._is_free():
            if time.monotonic() > deadline:
                raise self._busy()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        self._note(f"{self._me} {time.monotonic():.3f}")

    def _is_free(self) -> bool:
        """Takes the lock where nobody has it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _release(self) -> None:
        self._note("")
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _note(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same, without a name
            os.pwrite(self._file, holder.ljust(_RECORD_BYTES).encode("ascii"), 0)

    def _busy(self) -> UnavailableError:
        owner = self.owner()
        if owner is None:
            return UnavailableError(f"the store is busy: others wrote for more than {TURN_TIMEOUT_S:.0f} s")
        advice = f": kill -CONT {owner.pid} lets it go on" if owner.state in "Tt" else ""
        return UnavailableError(f"the store is busy: {owner}{advice}", {"pid": owner.pid, "held_s": owner.held_s})


class WriteLockWatch:
    """Looks at the holder again and again. One that computes, or waits for the disk, may hold the lock for long."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen: tuple[int, int, int] | None = None
        self._since = 0.0

    def is_stuck(self, owner: WriteLockOwner | None) -> bool:
        """Returns True if this holder has had the lock, and has used no processor time, for longer than the limit."""
        if owner is None or owner.state == _WAITS_FOR_DISK:
            self._seen = None
            return False
        seen = (owner.pid, owner.started, owner.cpu_ticks)
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        return min(owner.held_s, self._clock() - self._since) > self._limit_s


def _started(pid: int) -> int:
    status = process_status(pid)
    return -1 if status is None else status.started
