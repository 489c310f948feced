"""Who says that it lives, under which name, how often, and how long its silence may last. Pure.

A beat is a row of ``services``; the supervisor beats in memory that the servers share, too. What kills a silent runner
is the supervisor's own setting (``--runner-heartbeat-timeout-s``): here it is only what others say of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A service whose beats are kept. Those of a job have its key in their name."""

    name: str
    beats_every_s: float
    silent_after_s: float

    def of_job(self, job_key: int) -> str:
        """Returns the name for the job with that key."""
        return f"{self.name}{job_key}"

    def is_silent(self, age_s: float | None) -> bool:
        """Returns True if a beat of that age is too old to say anything; None is one that never came."""
        return age_s is None or age_s > self.silent_after_s


SUPERVISOR = Service(name="supervisor", beats_every_s=2.0, silent_after_s=15.0)
GATEWAY = Service(name="gateway", beats_every_s=5.0, silent_after_s=15.0)
"""That sessions are open: it beats while there are some."""
ENGINE = Service(name="engine of job ", beats_every_s=3.0, silent_after_s=15.0)
"""How a job's engine is, for as long as it is not well: its runner says so, or the gateway."""
DEVICES = Service(name="devices of job ", beats_every_s=5.0, silent_after_s=60.0)
"""How the devices of a job are."""
CONCURRENCY = Service(name="concurrency of job ", beats_every_s=5.0, silent_after_s=60.0)
"""How many episodes a job with ``num_process: auto`` plays at once, and why."""
PROMPTS = Service(name="prompts of job ", beats_every_s=math.inf, silent_after_s=math.inf)
"""What the engine of a job was found to do to prompts: said once of each engine, and true until another is asked."""
