"""Routes of the service itself: Prometheus metrics and the OpenAPI document."""

from __future__ import annotations

from flask import Response

from slime_plugins.rollout_buffer.openapi.operations import text
from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.server.http import json_reply, the_buffer
from slime_plugins.rollout_buffer.server.routing import Routes

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

routes = Routes("service")


@routes.get("/metrics", reply=text(), content_types=("text/plain",))
def metrics() -> Response:
    """Return metrics for Prometheus.

    Every number is read from the store at the time of the request. docs/metrics.md lists the names.
    """
    return Response(metrics_page(the_buffer().store), content_type=PROMETHEUS_TEXT)


@routes.get("/openapi.json", reply={"type": "object"})
def openapi() -> Response:
    """Return this description.

    It is in OpenAPI 3.1.
    """
    from slime_plugins.rollout_buffer.openapi.document import openapi_document
    from slime_plugins.rollout_buffer.server.app import OPERATIONS

    return json_reply(openapi_document(OPERATIONS))
