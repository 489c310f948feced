"""Many callers, one commit: work that waits is done together, so that all of it shares one fsync.

There is no thread of its own. The first caller that finds nobody at work leads: it takes everything that waits, has it
processed as one batch, and wakes the others. What arrived in the meantime is led by the first who waited. Alone, a
caller pays nothing for company it does not have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

MAX_BATCH = 64

Work = TypeVar("Work")


class Ticket(Generic[Work]):
    """One caller's work and, once its batch is processed, what came of it: a result or an error."""

    __slots__ = ("done", "error", "result", "sleep", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False
        self.sleep = threading.Lock()
        """Held until the caller is woken; lighter than an event, of which every write would need two."""
        self.sleep.acquire()


class GroupCommit(Generic[Work]):
    """Processes the work of many threads in batches, one batch at a time, in order of arrival."""

    def __init__(self, process: Callable[[Sequence[Ticket[Work]]], None]) -> None:
        """``process`` sets ``result`` or ``error`` of every ticket; what it raises becomes the error of all of them."""
        self._process = process
        self._lock = threading.Lock()
        self._waiting: list[Ticket[Work]] = []
        self._led = False

    def run(self, work: Work) -> Any:
        """Returns what came of the work, after the batch that held it was processed.

        Raises:
            Exception: whatever the work, or the processing of its batch, raised.
        """
        ticket = Ticket(work)
        with self._lock:
            self._waiting.append(ticket)
            leads, self._led = not self._led, True
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
        except BaseException as error:  # noqa: BLE001 - each waiting caller raises it; swallowing would hang them
            for ticket in batch:
                ticket.error = error
        finally:
            self._hand_over(batch)

    def _hand_over(self, batch: Sequence[Ticket[Work]]) -> None:
        with self._lock:
            successor = self._waiting[0] if self._waiting else None
            self._led = successor is not None
        for ticket in batch:
            ticket.done = True
            ticket.sleep.release()
        if successor is not None:
            successor.sleep.release()
