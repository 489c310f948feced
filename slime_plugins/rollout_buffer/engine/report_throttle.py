"""Limits reports of an engine's state: one per heartbeat interval during trouble, and one after recovery."""

from __future__ import annotations

import math
import time

from slime_plugins.rollout_buffer.rules.heartbeats import ENGINE
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble


class ReportThrottle:
    """Selects the reports of one engine to store; none while it works."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._in_trouble = False

    def is_due(self, report: EngineReport) -> bool:
        """Returns True if the report is to be stored, and records that it was."""
        in_trouble = report.code is not EngineTrouble.NONE
        if not (in_trouble or self._in_trouble) or time.monotonic() - self._told_at < ENGINE.beats_every_s:
            return False
        self._told_at, self._in_trouble = time.monotonic(), in_trouble
        return True
