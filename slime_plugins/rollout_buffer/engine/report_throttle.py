"""When how an engine is should be told on: every few seconds while it gives no tokens, and once when it does again."""

from __future__ import annotations

import math
import time

from slime_plugins.rollout_buffer.rules.heartbeats import ENGINE
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble


class ReportThrottle:
    """Of one engine's reports, lets pass those that somebody should keep; nothing while it is well."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._in_trouble = False

    def is_due(self, report: EngineReport) -> bool:
        """Returns whether to keep the report; then it counts as kept."""
        in_trouble = report.code is not EngineTrouble.NONE
        if not (in_trouble or self._in_trouble) or time.monotonic() - self._told_at < ENGINE.beats_every_s:
            return False
        self._told_at, self._in_trouble = time.monotonic(), in_trouble
        return True
