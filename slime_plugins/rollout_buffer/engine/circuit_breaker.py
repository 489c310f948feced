"""A circuit breaker over all turns of a job: pauses the job while its engine does not work.

It opens when the engine has answered no request for ``AWAY_TIMEOUT_S`` or an attempt failed because of that, or when
``MAX_FAILURES`` attempts of at least ``MIN_FAILED_INSTANCES`` input lines failed and a probe of one token fails too. It
closes when a probe succeeds. The job waits without limit for an unreachable engine. If the engine itself refuses every
probe for ``REFUSED_TIMEOUT_S``, ``verdict`` returns the reason and the job fails. ``ReportThrottle`` limits the reports
of an engine's state: one per heartbeat interval during trouble, and one after recovery.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Final

from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.errors import EngineAwayError, EngineError
from slime_plugins.rollout_buffer.rules.heartbeats import ENGINE
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble

AWAY_TIMEOUT_S: Final = 60.0
MAX_FAILURES: Final = 16
MIN_FAILED_INSTANCES: Final = 2
"""Failures of a single input line are probably caused by that line."""
PROBE_INTERVAL_S: Final = 10.0
REFUSED_TIMEOUT_S: Final = 600.0
"""A trainer that loads weights, or a server that starts, may refuse requests for a while."""


class CircuitBreaker:
    """Watches the engine of one job; the caller polls ``trouble`` and ``has_recovered``."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine
        self._looked_at: float | None = None
        """When ``trouble`` was last called; None after a pause."""
        self._away_s = 0.0
        """How long the engine has answered no request, pauses excluded."""
        self._failures = 0
        """Failed attempts since the last episode that finished."""
        self._failed_instances: set[str] = set()
        self._last_failure = ""
        self.answers_others = False
        """True if the engine answered a probe after many failed attempts: the job's own requests cause the failures."""
        self._probed_at = -math.inf
        self._refused_since: float | None = None
        """The time since which the engine itself has refused every probe."""
        self._probing: asyncio.Task[bool] | None = None

    def failed(self, instance_id: str, error: EngineError) -> None:
        """Counts an attempt that failed with an engine error."""
        self._failures += 1
        self._failed_instances.add(instance_id)
        self._last_failure = error.message
        if isinstance(error, EngineAwayError):
            self._away_s = math.inf

    def succeeded(self) -> None:
        """Resets the failure count, because an episode finished."""
        self.answers_others = False
        self._reset_failures()

    def _reset_failures(self) -> None:
        self._failures = 0
        self._failed_instances.clear()

    def trouble(self) -> str:
        """Returns why no further episode should start, as a predicate of "the engine"; empty while it works.

        Only time between calls of this method counts, so a pause of the job does not.
        """
        self._count_time()
        self._refused_since = None
        if self._away_s > AWAY_TIMEOUT_S:
            return self._engine.refusal or "answers no request"
        if self._failures < MAX_FAILURES or len(self._failed_instances) < MIN_FAILED_INSTANCES:
            return ""
        answered = self._probe()
        if answered:
            self.answers_others = True
            self._reset_failures()
        return f"fails every attempt: {self._last_failure}" if answered is False else ""

    def has_recovered(self) -> bool:
        """Returns True once the engine has answered a probe; sends one every ``PROBE_INTERVAL_S`` in the background."""
        self._looked_at = None
        recovered = self._probe() is True
        if recovered:
            self._away_s = 0.0
            self.succeeded()
        return recovered

    def verdict(self) -> str:
        """Returns why the job must fail, as a predicate of "the engine"; empty while it may wait."""
        refused_s = 0.0 if self._refused_since is None else time.monotonic() - self._refused_since
        if refused_s <= REFUSED_TIMEOUT_S:
            return ""
        return f"refuses every request, even a probe of one token, for {refused_s:.0f} s: {self._engine.probe_refusal}"

    async def close(self) -> None:
        """Cancels the probe in flight."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    def _count_time(self) -> None:
        now = time.monotonic()
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._away_s = self._away_s + passed if self._engine.is_away else 0.0

    def _probe(self) -> bool | None:
        """Returns the result of a probe once it is known, else None; starts a probe every ``PROBE_INTERVAL_S``."""
        if self._probing is not None and self._probing.done():
            probing, self._probing = self._probing, None
            answered = not probing.cancelled() and probing.result()
            if answered or not self._engine.probe_refusal:
                self._refused_since = None
            elif self._refused_since is None:
                self._refused_since = time.monotonic()
            return answered
        if self._probing is None and time.monotonic() - self._probed_at > PROBE_INTERVAL_S:
            self._probed_at = time.monotonic()
            self._probing = asyncio.create_task(self._engine.answers())
        return None


class ReportThrottle:
    """Selects the reports of one engine that are stored: none while the engine works."""

    def __init__(self) -> None:
        self._stored_at = -math.inf
        self._in_trouble = False
        """Whether the report that was stored last is one of trouble."""

    def is_due(self, report: EngineReport) -> bool:
        """Returns True if the report is to be stored; call ``mark_stored`` afterwards."""
        has_news = report.code is not EngineTrouble.NONE or self._in_trouble
        return has_news and time.monotonic() - self._stored_at >= ENGINE.beats_every_s

    def mark_stored(self, report: EngineReport) -> None:
        self._stored_at, self._in_trouble = time.monotonic(), report.code is not EngineTrouble.NONE
