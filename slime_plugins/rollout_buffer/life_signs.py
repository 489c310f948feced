"""Whether a process still gets on with its work: it renews a file while its event loop turns; who watches has a clock.

The file is not the store, and who watches is a thread of its own: a process that was frozen in the middle of a
transaction keeps everybody else from writing, also the one that is to notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["FIRST_SIGN_PATIENCE_S", "Silence", "show_life"]

INTERVAL_S = 2.0
FIRST_SIGN_PATIENCE_S = 600.0
"""How long a process may need to begin: it may load models before its event loop turns."""

logger = logging.getLogger(__name__)


async def show_life(path: Path) -> None:
    """Renews a life sign for as long as the event loop turns; runs until it is cancelled."""
    while True:
        _renew(path)
        await asyncio.sleep(INTERVAL_S)


def _renew(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        logger.warning("the life sign %s cannot be renewed: %s", path, error)


class Silence:
    """How long a process has shown no life, by the watcher's clock: what the system's clock does is no matter."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins to watch; a sign that is there already is a predecessor's."""
        self._path = path
        self._clock = clock
        self._first = self._last = self._sign()
        self._since = clock()

    def is_too_long(self, patience_s: float) -> bool:
        """Tells whether the last sign is older than ``patience_s``, or the first one does not come at all."""
        sign = self._sign()
        if sign != self._last:
            self._last, self._since = sign, self._clock()
        allowed = max(patience_s, FIRST_SIGN_PATIENCE_S) if sign == self._first else patience_s
        return self._clock() - self._since > allowed

    def _sign(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None
