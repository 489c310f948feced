"""The writers' turn: one process after the other writes, in order, and a holder that hangs is known by name.

SQLite's own waiting sleeps longer each time and is not fair. Two file locks are: who waits for the second holds the
first, so that who has just written cannot overtake. The kernel wakes who waits, and frees what a killed process held.
A process that is stopped (SIGSTOP, a debugger, swap) keeps the turn: the others wait no longer than a limit, and are
told who it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file

TURN_TIMEOUT_S = 8.0
"""How long a writer waits for its turn. No transaction of ours takes that long."""
_RECORD_BYTES = 64
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for the disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteLockOwner:
    """The living process that holds the turn."""

    pid: int
    started: int
    """Clock ticks since boot: with the id, it names one process for ever."""
    held_s: float
    state: str
    """What the kernel says it does: R, S, D (waits for the disk), T (stopped) …"""

    def __str__(self) -> str:
        doing = f" ({_STATES[self.state]})" if self.state in _STATES else ""
        return f"process {self.pid}{doing} has held the writers' turn for {self.held_s:.0f} s"


class WriteLocks:
    """Lets one process after the other write. One thread of a process waits for the others, its siblings for it."""

    def __init__(self, folder: Path) -> None:
        self._thread_lock = _FairLock()
        self._next, self._active = (open_lock_file(folder / name) for name in ("writer.next", "writer.active"))
        self._me = f"{os.getpid()} {_started(os.getpid())}"
        self._waiting: _Waiting | None = None
        self._closed = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the turn for a block.

        Raises:
            UnavailableError: it did not come in ``TURN_TIMEOUT_S``; the sentence names who holds it.
        """
        deadline = time.monotonic() + TURN_TIMEOUT_S
        if not self._thread_lock.acquire(TURN_TIMEOUT_S):
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
            pid, started, since = os.pread(self._active, _RECORD_BYTES, 0).decode("ascii").split()
        except (OSError, ValueError):
            return None
        status = process_status(int(pid))
        if status is None or status.started != int(started):
            return None  # it died, and the kernel took the turn from it
        held_s = max(0.0, time.monotonic() - float(since))
        return WriteLockOwner(pid=int(pid), started=int(started), held_s=held_s, state=status.state)

    def close(self) -> None:
        """Closes the lock files; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._waiting is None or not self._waiting.close_when_over():
            os.close(self._next)
            os.close(self._active)

    def _acquire(self, deadline: float) -> None:
        if self._waiting is None and self._take_at_once():
            self._sign()
            return
        if self._waiting is None or not self._waiting.is_wanted_again():
            self._waiting = _Waiting(self._next, self._active)
        if not self._waiting.is_granted(max(0.0, deadline - time.monotonic())):
            raise self._busy()
        self._waiting = None
        self._sign()

    def _take_at_once(self) -> bool:
        """Takes the turn when nobody else has it or waits for it."""
        if not _try_lock(self._next):
            return False
        try:
            return _try_lock(self._active)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def _sign(self) -> None:
        self._write(f"{self._me} {time.monotonic():.3f}")

    def _release(self) -> None:
        self._write("")
        fcntl.flock(self._active, fcntl.LOCK_UN)

    def _write(self, record: str) -> None:
        with contextlib.suppress(OSError):  # a full disk: the turn is held all the same, without a name
            os.pwrite(self._active, record.ljust(_RECORD_BYTES).encode("ascii"), 0)

    def _busy(self) -> UnavailableError:
        owner = self.owner()
        if owner is None:
            return UnavailableError(f"the store is busy: others wrote for more than {TURN_TIMEOUT_S:.0f} s")
        advice = f": kill -CONT {owner.pid} lets it go on" if owner.state in "Tt" else ""
        return UnavailableError(f"the store is busy: {owner}{advice}", {"pid": owner.pid, "held_s": owner.held_s})


class _FairLock:
    """A lock that the threads of a process get in the order in which they came: none takes it twice before others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._queue: deque[threading.Event] = deque()

    def acquire(self, timeout_s: float) -> bool:
        """Returns whether the caller has it."""
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return True
            mine = threading.Event()
            self._queue.append(mine)
        if mine.wait(timeout_s):
            return True
        with self._lock:
            if mine.is_set():  # it came while the wait ended
                return True
            self._queue.remove(mine)
            return False

    def release(self) -> None:
        """Hands it to who has waited longest."""
        with self._lock:
            if self._queue:
                self._queue.popleft().set()
            else:
                self._is_held = False


class _Waiting:
    """A thread that waits in the kernel for both locks, first come first served.

    It cannot be interrupted: who gives up leaves it waiting, who comes next goes on with it, and what nobody wants any
    more when it comes is let go at once.
    """

    def __init__(self, first: int, second: int) -> None:
        self._descriptors = (first, second)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._wanted, self._granted, self._closing = True, False, False
        threading.Thread(target=self._wait, name="waits to write", daemon=True).start()

    def is_granted(self, timeout_s: float) -> bool:
        """Waits, and returns whether the caller has the turn; it gives up when the time is over."""
        self._done.wait(timeout_s)
        with self._lock:
            self._wanted = self._granted
            return self._granted

    def is_wanted_again(self) -> bool:
        """Goes on for another caller; False when it is over."""
        with self._lock:
            self._wanted = not self._done.is_set()
            return self._wanted

    def close_when_over(self) -> bool:
        """Has the thread close the files, which it still waits for; False when it is over."""
        with self._lock:
            self._closing = not self._done.is_set()
            return self._closing

    def _wait(self) -> None:
        first, second = self._descriptors
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX)
        finally:
            fcntl.flock(first, fcntl.LOCK_UN)
        with self._lock:
            self._granted = self._wanted and not self._closing
            if not self._granted:
                fcntl.flock(second, fcntl.LOCK_UN)
            if self._closing:
                os.close(first)
                os.close(second)
            self._done.set()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _started(pid: int) -> int:
    status = process_status(pid)
    return -1 if status is None else status.started
