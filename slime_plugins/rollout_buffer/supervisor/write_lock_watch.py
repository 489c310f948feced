"""Whether the process that holds the writers' turn moves: one frozen in the middle of a write stops all others."""

from __future__ import annotations

import time
from collections.abc import Callable

from slime_plugins.rollout_buffer.storage.write_lock import WriteLockOwner
from slime_plugins.rollout_buffer.supervisor.child_processes import cpu_ticks

WAITS_FOR_DISK = "D"


class WriteLockWatch:
    """Looks at the holder again and again. One that computes, or waits for the disk, may hold the turn for long."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen: tuple[int, int, int | None] | None = None
        self._since = 0.0

    def is_stuck(self, owner: WriteLockOwner | None) -> bool:
        """Tells whether this holder has had the turn, and has not moved, for longer than the limit."""
        if owner is None or owner.state == WAITS_FOR_DISK:
            self._seen = None
            return False
        seen = (owner.pid, owner.started, cpu_ticks(owner.pid))
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        return min(owner.held_s, self._clock() - self._since) > self._limit_s
