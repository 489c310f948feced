"""``GET /health``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.server.http import Answer, ServerContext, as_json
from slime_plugins.rollout_buffer.server.supervisor_state import read_supervisor_state
from slime_plugins.rollout_buffer.wire.job_replies import Health


def describe_health(context: ServerContext) -> Answer:
    """Returns the health of store and supervisor; needs no token and contains no secret."""
    state = read_supervisor_state(context)
    report = Health(
        status="ok" if state.reason is None else "degraded",
        reason=state.reason,
        supervisor="alive" if state.alive else "not seen",
        task_types=sorted(state.catalog.get("task_types", {})) if state.alive else [],
        extensions=state.catalog.get("extensions", []) if state.alive else [],
    )
    return Answer(as_json(report), 200 if state.serving else 503)
