"""The Flask application: every route that ``asgi`` does not answer itself.

Routes parse the request, call the ``Buffer`` or ``reporting`` and encode the result. The application has no state of
its own, so any number of gunicorn workers may run it. It imports no generator, device or engine.
"""

from __future__ import annotations

from flask import Flask

from slime_plugins.rollout_buffer.openapi.operations import Operation, ref
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import IdConverter, ServerContext, check_before_route, error_reply
from slime_plugins.rollout_buffer.server.routes import (
    dashboard,
    deliveries,
    groups,
    images,
    jobs,
    service,
    training_reports,
    trajectories,
)
from slime_plugins.rollout_buffer.wire import MAX_ITEMS
from slime_plugins.rollout_buffer.wire.delivery_replies import PollReply, WriteReply
from slime_plugins.rollout_buffer.wire.job_replies import Health
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload

ROUTES = (jobs, deliveries, groups, trajectories, images, training_reports, service, dashboard)

ASGI_OPERATIONS = (
    Operation(
        route="POST /get_rollout_data",
        summary="Fetch finished groups",
        description="`{}` delivers everything that is ready, without a lease. With `lease_s`, groups that are not "
        "acknowledged in time are delivered again, unchanged: the same poll gets the same `delivery_id`, another poll "
        "a new one. With `wait_s` it waits for the next group.",
        body=PollPayload,
        reply=PollReply,
        errors=(404, 409),
    ),
    Operation(
        route="POST /buffer/write",
        summary="Write finished items",
        description=f"One item, or up to {MAX_ITEMS} under `items`. Idempotent by `uid`: after a lost "
        "reply, send the same again. A refused request stores nothing.",
        body=ref("WriteBody"),
        reply=WriteReply,
        errors=(404, 409, 422),
    ),
    Operation(
        route="POST /jobs/{job_id}/buffer/write",
        summary="Write finished items of a job",
        description="As `/buffer/write`, for items that name no job, such as those of slime's generators. "
        "A `job_id` in the body comes first.",
        body=ref("WriteBody"),
        reply=WriteReply,
        errors=(409, 422),
    ),
    Operation(
        route="GET /health",
        summary="Health of the service",
        description="200 if a supervisor plays jobs; needs no token. `status` is `degraded`, with 200, when the "
        "store has a problem; with a full disk, polls and acknowledgements work and writes answer 507.",
        reply=Health,
        other_replies={
            503: (
                "The supervisor has exited, is frozen or is starting: no job is run.",
                {"anyOf": [ref("Health"), ref("Error")]},
            )
        },
        needs_token=False,
    ),
)
"""Routes that ``asgi`` answers itself."""
OPERATIONS = (*ASGI_OPERATIONS, *(operation for module in ROUTES for operation in module.routes.operations))


def create_app(settings: ServeSettings) -> Flask:
    """Builds the application; each gunicorn worker calls this once."""
    app = Flask("rollout_buffer", static_folder=None)
    app.url_map.merge_slashes = False  # an id may hold slashes, also two in a row
    app.url_map.converters["id"] = IdConverter
    app.extensions["rollout_buffer"] = ServerContext(settings)
    app.before_request(check_before_route)
    for module in ROUTES:
        app.register_blueprint(module.routes.blueprint)
    app.register_error_handler(Exception, error_reply)
    return app
