"""Ends a supervisor that is frozen in the middle of a write: it ends all others, and nobody could write any more."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.write_lock import WriteLockWatch

INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


def watch_supervisor(store: Store, limit_s: float) -> None:
    """Starts a thread that kills this worker's supervisor if it holds the write lock for ``limit_s`` without moving.

    The kernel ends its children with it, and whatever runs ``serve`` (systemd, a container) starts it again.
    """
    threading.Thread(target=_watch, args=(store, WriteLockWatch(limit_s)), name="supervisor watch", daemon=True).start()


def _watch(store: Store, watch: WriteLockWatch) -> None:
    while True:
        time.sleep(INTERVAL_S)
        owner = store.turn_owner()
        if owner is None or not watch.is_stuck(owner):
            continue
        gunicorn = process_status(os.getppid())
        if gunicorn is not None and gunicorn.parent == owner.pid:
            logger.error("%s, and does not move: it is the supervisor, killing it", owner)
            os.kill(owner.pid, signal.SIGKILL)
