"""Kills a supervisor that hangs while it holds the write lock.

Nothing else could kill it: it is the supervisor itself that kills hanging processes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.write_lock import WriteLockWatch

WATCH_INTERVAL_S = 1.0
_VAIN = ", in vain: process 1 is killed only from outside; restart the container, and run it with --init"

logger = logging.getLogger(__name__)


def start_supervisor_watchdog(store: Store, limit_s: float) -> None:
    """Starts a thread that kills this worker's supervisor if it holds the write lock for ``limit_s`` without progress.

    The kernel then kills the supervisor's children, and the service manager (systemd, the container's restart policy)
    restarts ``serve``. As process 1 of a container the supervisor cannot be killed from inside: that is only logged.
    """
    threading.Thread(target=_watch, args=(store, WriteLockWatch(limit_s)), name="supervisor watch", daemon=True).start()


def _watch(store: Store, watch: WriteLockWatch) -> None:
    reported = False
    while True:
        time.sleep(WATCH_INTERVAL_S)
        owner = store.write_lock_owner()
        # The supervisor is this worker's grandparent; another process that owns the lock is not killed here.
        gunicorn = process_status(os.getppid())
        if owner is None or not watch.is_stuck(owner) or gunicorn is None or gunicorn.parent != owner.pid:
            reported = False
            continue
        if not reported:
            logger.error("%s, without progress: killing it, the supervisor%s", owner, _VAIN if owner.pid == 1 else "")
            reported = True
        os.kill(owner.pid, signal.SIGKILL)
