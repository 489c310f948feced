"""Heartbeats between processes of one machine, and who notices that they stop.

A heartbeat lives in shared memory (a memfd that a child inherits), not on the disk and not in the store: a full or
broken disk silences nobody, and a process that was frozen in the middle of a transaction can still be noticed by others
who wait for it. Times are of the machine's monotonic clock, which all processes share and nobody sets.
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
"""Environment variable that names the descriptor on which a child hears its supervisor's heartbeat."""
INTERVAL_S = 1.0
STARTUP_TIMEOUT_S = 600.0
"""How long a process may need until its first heartbeat: it may load models before its event loop turns."""
_SIZE = 4096
_MAX_TEXT = 300
"""Characters of one text: two of them fit the page, whatever they are."""
_READ_TRIES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The last heartbeat: how many seconds ago it was, and what the process said of itself."""

    age_s: float
    detail: Mapping[str, Any]


class Heartbeat:
    """A page of shared memory in which one process says that it lives, and from which others read it."""

    def __init__(self, descriptor: int | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Opens a new page, or the one behind a descriptor that this process inherited."""
        self.descriptor = os.memfd_create("heartbeat") if descriptor is None else descriptor
        os.set_inheritable(self.descriptor, False)
        self._clock = clock

    def beat(self, **detail: str | None) -> None:
        """Says that this process lives, and what is to be known of it; texts are cut to a sentence or two."""
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
                continue  # read in the middle of a write
            return Beat(age_s=max(0.0, self._clock() - beat["at"]), detail=beat["detail"])
        return None

    def clear(self) -> None:
        """Forgets what was said: another process is to say it."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Closes this process's side."""
        os.close(self.descriptor)


def supervisors_heartbeat() -> Heartbeat | None:
    """Returns the heartbeat of the supervisor that started this process; None when none did."""
    named = os.environ.get(HEARTBEAT_VARIABLE)
    return None if named is None else Heartbeat(int(named))


async def send_heartbeats(heartbeat: Heartbeat) -> None:
    """Beats for as long as the event loop turns; runs until it is cancelled."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(INTERVAL_S)


class HeartbeatMonitor:
    """Returns True if a child is frozen: its heartbeats stopped, or the kernel has it stopped (SIGSTOP, a debugger)."""

    def __init__(
        self,
        heartbeat: Heartbeat | None,
        is_stopped: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to watch a process that was just started; without a heartbeat only its being stopped counts."""
        self._heartbeat = heartbeat
        self._is_stopped = is_stopped
        self._clock = clock
        self._began = clock()
        self._stopped_since: float | None = None

    def is_frozen(self, heartbeat_timeout_s: float) -> bool:
        """Returns True if it has been without a heartbeat, or stopped, for longer than ``heartbeat_timeout_s``."""
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
