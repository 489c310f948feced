"""Duties that are done again and again; one that the store or the disk does not allow is put off, and said once."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping

from slime_plugins.rollout_buffer.errors import DamagedError, RolloutBufferError, StorageFullError, UnavailableError

__all__ = ["POSTPONED", "PeriodicTasks", "PeriodicThread"]

POSTPONED = (StorageFullError, UnavailableError, DamagedError, sqlite3.OperationalError, OSError)
"""What a full, busy, read-only or broken disk does. Anything else is a defect, and is not hidden."""
STUCK_AFTER_S = 15.0

Duty = Callable[[], None]

logger = logging.getLogger(__name__)


class PeriodicTasks:
    """Calls each duty once its interval is over, one after the other."""

    def __init__(self, intervals: Mapping[Duty, float], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``intervals`` names the seconds between two calls of each duty, in the order in which they are called."""
        self._intervals = dict(intervals)
        self._due = dict.fromkeys(intervals, 0.0)
        self._clock = clock
        self._put_off: dict[Duty, str] = {}
        self._current: tuple[Duty, float] | None = None

    def run_due(self) -> None:
        """Calls what is due.

        Raises:
            Exception: a defect of a duty. What a disk or a busy store does to one puts it off.
        """
        for duty, interval_s in self._intervals.items():
            if self._clock() >= self._due[duty]:
                self._due[duty] = self._clock() + interval_s
                self.run(duty)

    def run(self, duty: Duty) -> None:
        """Calls one duty, as ``run_due``."""
        self._current = (duty, self._clock())
        try:
            duty()
        except POSTPONED as error:
            self._note(duty, error.message if isinstance(error, RolloutBufferError) else str(error))
        else:
            if self._put_off.pop(duty, None) is not None:
                logger.info("%s: done again", _name(duty))
        finally:
            self._current = None

    def problem(self) -> str | None:
        """Returns a sentence on what is put off or does not come to its end; None when all goes well."""
        current = self._current
        if current is not None and (stuck_s := self._clock() - current[1]) > STUCK_AFTER_S:
            return f"{_name(current[0])} has not come to its end for {stuck_s:.0f} s"
        for duty, reason in list(self._put_off.items()):
            return f"{_name(duty)} is put off: {reason}"
        return None

    def _note(self, duty: Duty, reason: str) -> None:
        if self._put_off.get(duty) != reason:
            logger.error("%s is put off: %s", _name(duty), reason)
        self._put_off[duty] = reason


def _name(duty: Duty) -> str:
    return duty.__name__.strip("_").replace("_", " ")


class PeriodicThread:
    """Does duties in a thread of its own: those that may have to wait, for the store or the disk."""

    def __init__(self, name: str, duties: PeriodicTasks, *, tick_s: float) -> None:
        self.duties = duties
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
                self.duties.run_due()
                self._stopping.wait(self._tick_s)
        except Exception as error:  # noqa: BLE001 - raised by check(), in the thread that can end the process
            self._defect = error
