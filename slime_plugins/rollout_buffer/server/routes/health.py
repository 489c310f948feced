"""``GET /health``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.server.http import Answer, ServerContext, as_json
from slime_plugins.rollout_buffer.server.supervisor_state import read_supervisor_state
from slime_plugins.rollout_buffer.wire.job_replies import Health


def describe_health(context: ServerContext) -> Answer:
    """Returns the health of store and supervisor; needs no token and contains no secret."""
    seen = read_supervisor_state(context)
    report = Health(
        status="ok" if seen.reason is None else "degraded",
        reason=seen.reason,
        supervisor="alive" if seen.alive else "not seen",
        task_types=sorted(seen.catalog.get("task_types", {})) if seen.alive else [],
        extensions=seen.catalog.get("extensions", []) if seen.alive else [],
    )
    return Answer(as_json(report), 200 if seen.serving else 503)
