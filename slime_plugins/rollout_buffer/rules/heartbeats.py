"""Pure: the services that send heartbeats, their names, intervals and timeouts.

A heartbeat is a row of ``services``; the supervisor also writes one to memory that the servers share. The timeout after
which the supervisor kills a runner is its own setting (``--runner-heartbeat-timeout-s``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A service with heartbeats. A name that ends with a space is a prefix: the key of the job follows it."""

    name: str
    beats_every_s: float
    silent_after_s: float

    def of_job(self, job_key: int) -> str:
        """Returns the service's name for a job."""
        return f"{self.name}{job_key}"

    def is_silent(self, age_s: float | None) -> bool:
        """Returns True if a heartbeat of that age is too old; None is no heartbeat."""
        return age_s is None or age_s > self.silent_after_s


SUPERVISOR = Service(name="supervisor", beats_every_s=2.0, silent_after_s=15.0)
GATEWAY = Service(name="gateway", beats_every_s=5.0, silent_after_s=15.0)
"""Sent while sessions of the gateway are open."""
ENGINE = Service(name="engine of job ", beats_every_s=3.0, silent_after_s=15.0)
"""The trouble of a job's engine, sent by its runner or the gateway while the trouble lasts."""
DEVICES = Service(name="devices of job ", beats_every_s=5.0, silent_after_s=60.0)
"""The state of a job's devices."""
CONCURRENCY = Service(name="concurrency of job ", beats_every_s=5.0, silent_after_s=60.0)
"""The concurrency limit of a job with ``num_process: auto``, and its reason."""
PROMPTS = Service(name="prompts of job ", beats_every_s=math.inf, silent_after_s=math.inf)
"""Findings of the prompt probe of a job's engine: sent once for each engine, valid until the engine changes."""
