"""Group commit: the waiting work of many threads is processed as one batch with one fsync.

There is no writer thread and no gathering time. The first caller becomes the leader: it processes all waiting work as
one batch and wakes the other callers. The first caller that waits then leads the next batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

MAX_BATCH = 64
"""Largest number of callers whose work is one batch."""

Work = TypeVar("Work")


class Ticket(Generic[Work]):
    """One caller's work and, once its batch is processed, the result or error of this work."""

    __slots__ = ("done", "error", "result", "sleep", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.sleep = threading.Lock()
        """Held until the caller is woken; cheaper than a ``threading.Event``."""
        self.sleep.acquire()


class GroupCommit(Generic[Work]):
    """Processes the work of many threads in batches, one batch at a time, in order of arrival."""

    def __init__(self, process: Callable[[Sequence[Ticket[Work]]], None]) -> None:
        """``process`` sets ``result`` or ``error`` of each ticket; an exception becomes the error of all of them."""
        self._process = process
        self._lock = threading.Lock()
        self._waiting: list[Ticket[Work]] = []
        self._has_leader = False

    def run(self, work: Work) -> Any:
        """Returns the result of the work after its batch was processed.

        Raises:
            Exception: raised by the work or by the processing of its batch.
        """
        ticket = Ticket(work)
        with self._lock:
            self._waiting.append(ticket)
            leads, self._has_leader = not self._has_leader, True
        if not leads:
            ticket.sleep.acquire()
        if not ticket.done:
            self._lead()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _lead(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
        try:
            self._process(batch)
        except BaseException as error:  # noqa: BLE001 - each waiting caller raises it
            for ticket in batch:
                ticket.error = error
        finally:
            self._hand_over(batch)

    def _hand_over(self, batch: Sequence[Ticket[Work]]) -> None:
        with self._lock:
            successor = self._waiting[0] if self._waiting else None
            self._has_leader = successor is not None
        for ticket in batch:
            ticket.done = True
            ticket.sleep.release()
        if successor is not None:
            successor.sleep.release()
