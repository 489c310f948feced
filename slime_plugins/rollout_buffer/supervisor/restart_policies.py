"""When each child is started again, and how long it may go without a heartbeat: the limits of ``serve``. Pure.

Heartbeats that are stored, and what others make of their silence, are in ``rules/heartbeats.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.serve_settings import ServeSettings

MAX_CRASHES = 8
"""A job fails after so many crashes of its runner in a row, without a trajectory or minutes of work between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a child that crashed is started again.

    ``max_crashes`` in a row are the limit, None for none. A child that ran for ``steady_after_s`` begins to count anew.
    One that is not ready ``start_timeout_s`` after its start, or frozen for ``heartbeat_timeout_s``, counts as crashed.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    max_crashes: int | None = None
    steady_after_s: float = 300.0
    start_timeout_s: float = float("inf")
    heartbeat_timeout_s: float = 60.0


def server_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the limits of gunicorn's parent process; its workers are gunicorn's to restart."""
    heartbeat_timeout_s = settings.service_heartbeat_timeout_s
    return RestartPolicy(first_s=0.2, longest_s=10.0, steady_after_s=10.0, heartbeat_timeout_s=heartbeat_timeout_s)


def gateway_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the limits of the gateway."""
    heartbeat_timeout_s = settings.service_heartbeat_timeout_s
    return RestartPolicy(first_s=1.0, longest_s=30.0, steady_after_s=60.0, heartbeat_timeout_s=heartbeat_timeout_s)


def runner_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the limits of a job's runner, which has a setting of its own: a generator may block the event loop."""
    return RestartPolicy(max_crashes=MAX_CRASHES, heartbeat_timeout_s=settings.runner_heartbeat_timeout_s)


def ray_policy(settings: ServeSettings) -> RestartPolicy:
    """Returns the limits of the local Ray, which takes its time to come up."""
    return RestartPolicy(
        first_s=2.0,
        max_crashes=MAX_CRASHES,
        start_timeout_s=300.0,
        heartbeat_timeout_s=settings.service_heartbeat_timeout_s,
    )
