"""Restart limits and heartbeat timeouts of each child of ``serve``. Pure.

Heartbeats in the store have their limits in ``rules/heartbeats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.serve_settings import ServeSettings

MAX_CRASHES = 8
"""Consecutive crashes after which a runner, whose job then fails, or Ray is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a crashed child is restarted.

    The pause before a restart grows from ``first_s`` to ``longest_s``. After ``max_crashes`` in a row the child is
    given up; None is no limit. The count begins again if the child was ready for ``steady_after_s``, measured from its
    readiness to its last heartbeat. A child that is not ready within ``start_timeout_s``, or sends no
    heartbeat for ``heartbeat_timeout_s``, counts as crashed.
    """

    heartbeat_timeout_s: float
    first_s: float = 1.0
    longest_s: float = 60.0
    max_crashes: int | None = None
    steady_after_s: float = 300.0
    start_timeout_s: float = float("inf")


def server_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the policy of gunicorn's parent process, which restarts its own workers."""
    heartbeat_timeout_s = settings.service_heartbeat_timeout_s
    return RestartPolicy(first_s=0.2, longest_s=10.0, steady_after_s=5.0, heartbeat_timeout_s=heartbeat_timeout_s)


def gateway_policy(heartbeat_timeout_s: float) -> RestartPolicy:
    """Returns the policy of the gateway, whose agents' clients give up after a few retries within seconds."""
    return RestartPolicy(first_s=0.2, longest_s=2.0, steady_after_s=5.0, heartbeat_timeout_s=heartbeat_timeout_s)


def runner_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the policy of a job's runner; its heartbeat timeout is a setting, since a generator may block the event
    loop."""
    return RestartPolicy(max_crashes=MAX_CRASHES, heartbeat_timeout_s=settings.runner_heartbeat_timeout_s)


def ray_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the policy of the local Ray, which is slow to start."""
    return RestartPolicy(
        first_s=2.0,
        max_crashes=MAX_CRASHES,
        start_timeout_s=420.0,  # longer than its own attempts: it ends what it has started, which a kill would leave
        heartbeat_timeout_s=settings.service_heartbeat_timeout_s,
    )
