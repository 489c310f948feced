"""Routes of the service itself: Prometheus metrics and the OpenAPI document."""

from __future__ import annotations

from flask import Blueprint, Response

from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.server.http import (
    json_reply,
    the_inspection,
)

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

routes = Blueprint("rollout_buffer_service", __name__)


@routes.get("/metrics")
def metrics() -> Response:
    """Returns the numbers of the buffer in Prometheus' text format."""
    return Response(metrics_page(the_inspection(), SUPERVISOR.name), content_type=PROMETHEUS_TEXT)


@routes.get("/openapi.json")
def openapi() -> Response:
    """Returns the OpenAPI 3.1 document of all routes. Its schemas take longer to make than all else at a start."""
    from slime_plugins.rollout_buffer.openapi.document import openapi_document

    return json_reply(openapi_document())
