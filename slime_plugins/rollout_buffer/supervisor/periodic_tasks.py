"""Calls tasks at intervals. A task that the store or the disk prevents is called again later; the reason is logged
once."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping

from slime_plugins.rollout_buffer.errors import DamagedError, RolloutBufferError, StorageFullError, UnavailableError

POSTPONED = (StorageFullError, UnavailableError, DamagedError, sqlite3.OperationalError, OSError)
"""Errors of a full, busy, read-only or broken disk. Any other error is a defect and is raised."""
STUCK_AFTER_S = 15.0

Task = Callable[[], None]

logger = logging.getLogger(__name__)


class PeriodicTasks:
    """Calls each task when its interval has passed, one after the other."""

    def __init__(self, intervals: Mapping[Task, float], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``intervals`` maps each task to its seconds between calls, in calling order."""
        self._intervals = dict(intervals)
        self._due = dict.fromkeys(intervals, 0.0)
        self._clock = clock
        self._postponed: dict[Task, str] = {}
        self._current: tuple[Task, float] | None = None

    def run_due(self) -> None:
        """Calls the tasks that are due.

        Raises:
            Exception: a defect of a task; errors of the disk or a busy store postpone it instead.
        """
        for task, interval_s in self._intervals.items():
            if self._clock() >= self._due[task]:
                self._due[task] = self._clock() + interval_s
                self.run(task)

    def run(self, task: Task) -> None:
        """Calls one task, with the same errors as ``run_due``."""
        self._current = (task, self._clock())
        try:
            task()
        except POSTPONED as error:
            self._postpone(task, error.message if isinstance(error, RolloutBufferError) else str(error))
        else:
            if self._postponed.pop(task, None) is not None:
                logger.info("%s: done again", _name(task))
        finally:
            self._current = None

    def problem(self) -> str | None:
        """Returns a sentence on a task that is postponed or hangs; None if no task is."""
        current = self._current
        if current is not None and (stuck_s := self._clock() - current[1]) > STUCK_AFTER_S:
            return f"{_name(current[0])} has been running for {stuck_s:.0f} s"
        for task, reason in list(self._postponed.items()):
            return f"{_name(task)} is postponed: {reason}"
        return None

    def _postpone(self, task: Task, reason: str) -> None:
        if self._postponed.get(task) != reason:
            logger.error("%s is postponed: %s", _name(task), reason)
        self._postponed[task] = reason


def _name(task: Task) -> str:
    return task.__name__.strip("_").replace("_", " ")


class PeriodicThread:
    """Runs periodic tasks that may block on the store or the disk, in a thread."""

    def __init__(self, name: str, tasks: PeriodicTasks, *, tick_s: float) -> None:
        self.tasks = tasks
        self._tick_s = tick_s
        self._stopping = threading.Event()
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises the defect that ended the thread, if any."""
        if self._defect is not None:
            raise self._defect

    def stop(self, timeout_s: float) -> bool:
        """Stops the thread; returns False if it has not ended within ``timeout_s``, for example in a write."""
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
