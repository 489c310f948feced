"""Heartbeats between processes of one machine, and the monitor that detects missing ones.

A heartbeat is a page of shared memory (a memfd that a child inherits), not a file or a row of the store: a full disk
does not stop it, and a process frozen inside a transaction is still detected by processes that wait for it.

Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

HEARTBEAT_VARIABLE = "ROLLOUT_BUFFER_HEARTBEAT_FD"
"""Environment variable with the descriptor of the supervisor's heartbeat."""
READY_VARIABLE = "ROLLOUT_BUFFER_READY_FD"
"""Environment variable with the descriptor on which a worker of the server reports that it answers."""
INTERVAL_S = 1.0
STARTUP_TIMEOUT_S = 600.0
"""Time limit of a process for its first heartbeat; it may load models before its event loop starts."""
_SIZE = 4096
_MAX_TEXT = 300
"""Limit of a text, in characters: two of them always fit the page."""
_READ_TRIES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The last heartbeat: its age in seconds, and the texts sent with it."""

    age_s: float
    detail: Mapping[str, Any]


class Heartbeat:
    """A page of shared memory that one process writes heartbeats to and others read."""

    def __init__(self, descriptor: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens a new page, or the page of an inherited descriptor."""
        self.descriptor = os.memfd_create("heartbeat") if descriptor is None else descriptor
        os.set_inheritable(self.descriptor, False)
        self._clock = clock

    def beat(self, **detail: str | None) -> None:
        """Writes a heartbeat with short texts; long texts are truncated."""
        texts = {name: text[:_MAX_TEXT] for name, text in detail.items() if text is not None}
        page = json.dumps({"at": self._clock(), "detail": texts}, ensure_ascii=False).encode(errors="replace")
        os.pwrite(self.descriptor, page.ljust(_SIZE), 0)

    def last(self) -> Beat | None:
        """Returns the last heartbeat; None before the first."""
        for _ in range(_READ_TRIES):
            page = os.pread(self.descriptor, _SIZE, 0)
            if not page:
                return None
            try:
                beat = json.loads(page)
            except ValueError:
                continue  # read during a write
            return Beat(age_s=max(0.0, self._clock() - beat["at"]), detail=beat["detail"])
        return None

    def clear(self) -> None:
        """Deletes the last heartbeat, before another process takes over the page."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Closes this process's descriptor."""
        os.close(self.descriptor)


def supervisors_heartbeat() -> Heartbeat | None:
    """Returns the heartbeat of the supervisor that started this process; None without a supervisor."""
    named = os.environ.get(HEARTBEAT_VARIABLE)
    return None if named is None else Heartbeat(int(named))


async def send_heartbeats(heartbeat: Heartbeat) -> None:
    """Sends heartbeats from the event loop until cancelled."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(INTERVAL_S)


class HeartbeatMonitor:
    """Detects a frozen child: its heartbeats are missing, or it is stopped (SIGSTOP, a debugger)."""

    def __init__(
        self,
        heartbeat: Heartbeat | None,
        is_stopped: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watches a process that was just started; without a heartbeat it detects only stopping."""
        self._heartbeat = heartbeat
        self._is_stopped = is_stopped
        self._clock = clock
        self._began = clock()
        self._stopped_since: float | None = None

    def is_frozen(self, heartbeat_timeout_s: float) -> bool:
        """Returns True if the child has been without a heartbeat, or stopped, for longer than the timeout."""
        if not self._is_stopped():
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = self._clock()
        stopped_s = 0.0 if self._stopped_since is None else self._clock() - self._stopped_since
        return stopped_s > heartbeat_timeout_s or self._is_silent(heartbeat_timeout_s)

    def _is_silent(self, heartbeat_timeout_s: float) -> bool:
        if self._heartbeat is None:
            return False
        beat = self._heartbeat.last()
        if beat is None:
            return self._clock() - self._began > max(heartbeat_timeout_s, STARTUP_TIMEOUT_S)
        return beat.age_s > heartbeat_timeout_s
