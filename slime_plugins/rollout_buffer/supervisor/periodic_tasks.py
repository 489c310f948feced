"""Tasks that are done again and again; one that the store or the disk does not allow is put off, and said once."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping

from slime_plugins.rollout_buffer.errors import DamagedError, RolloutBufferError, StorageFullError, UnavailableError

POSTPONED = (StorageFullError, UnavailableError, DamagedError, sqlite3.OperationalError, OSError)
"""What a full, busy, read-only or broken disk does. Anything else is a defect, and is not hidden."""
STUCK_AFTER_S = 15.0

Task = Callable[[], None]

logger = logging.getLogger(__name__)


class PeriodicTasks:
    """Calls each task once its interval is over, one after the other."""

    def __init__(self, intervals: Mapping[Task, float], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``intervals`` names the seconds between two calls of each task, in the order in which they are called."""
        self._intervals = dict(intervals)
        self._due = dict.fromkeys(intervals, 0.0)
        self._clock = clock
        self._put_off: dict[Task, str] = {}
        self._current: tuple[Task, float] | None = None

    def run_due(self) -> None:
        """Calls what is due.

        Raises:
            Exception: a defect of a task. What a disk or a busy store does to one puts it off.
        """
        for task, interval_s in self._intervals.items():
            if self._clock() >= self._due[task]:
                self._due[task] = self._clock() + interval_s
                self.run(task)

    def run(self, task: Task) -> None:
        """Calls one task, as ``run_due``."""
        self._current = (task, self._clock())
        try:
            task()
        except POSTPONED as error:
            self._note(task, error.message if isinstance(error, RolloutBufferError) else str(error))
        else:
            if self._put_off.pop(task, None) is not None:
                logger.info("%s: done again", _name(task))
        finally:
            self._current = None

    def problem(self) -> str | None:
        """Returns a sentence on what is put off or does not come to its end; None when all goes well."""
        current = self._current
        if current is not None and (stuck_s := self._clock() - current[1]) > STUCK_AFTER_S:
            return f"{_name(current[0])} has not come to its end for {stuck_s:.0f} s"
        for task, reason in list(self._put_off.items()):
            return f"{_name(task)} is put off: {reason}"
        return None

    def _note(self, task: Task, reason: str) -> None:
        if self._put_off.get(task) != reason:
            logger.error("%s is put off: %s", _name(task), reason)
        self._put_off[task] = reason


def _name(task: Task) -> str:
    return task.__name__.strip("_").replace("_", " ")


class PeriodicThread:
    """Does tasks in a thread of its own: those that may have to wait, for the store or the disk."""

    def __init__(self, name: str, tasks: PeriodicTasks, *, tick_s: float) -> None:
        self.tasks = tasks
        self._tick_s = tick_s
        self._stopping = threading.Event()
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def check(self) -> None:
        """Raises the defect that ended the thread, if one did."""
        if self._defect is not None:
            raise self._defect

    def stop(self, timeout_s: float) -> bool:
        """Tells it to end, and whether it has ended within ``timeout_s``: it may hang in a write."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.tasks.run_due()
                self._stopping.wait(self._tick_s)
        except Exception as error:  # noqa: BLE001 - raised by check(), in the thread that can end the process
            self._defect = error
