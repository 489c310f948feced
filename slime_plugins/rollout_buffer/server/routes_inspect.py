"""Routes that only look: past deliveries, trajectories, metrics, and what the API is."""

from __future__ import annotations

import orjson
from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer.protocol import request_models
from slime_plugins.rollout_buffer.protocol.query_params import (
    AttemptPageQuery,
    DeliveryQuery,
    PageQuery,
    SearchQuery,
    TrajectoryFilters,
    TrajectoryPageQuery,
    TrajectoryQuery,
)
from slime_plugins.rollout_buffer.protocol.request_models import PollPayload
from slime_plugins.rollout_buffer.reporting.failed_attempts import failed_attempts
from slime_plugins.rollout_buffer.reporting.inspection import without_generations
from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.server.http import (
    Answer,
    as_response,
    json_reply,
    the_buffer,
    the_context,
    the_inspection,
)
from slime_plugins.rollout_buffer.state.reward_versions import scores_for

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

routes = Blueprint("rollout_buffer_inspect", __name__)


@routes.get("/jobs/<id:job_id>/deliveries")
def deliveries(job_id: str) -> Response:
    """Lists a job's deliveries, newest first."""
    page = request_models.parse(PageQuery, request.args.to_dict())
    return json_reply(the_inspection().deliveries(job_id, page))


@routes.get("/deliveries/<id:delivery_id>")
def delivery(delivery_id: str) -> Response:
    """Returns a past delivery as its poll got it, with its dummies. Changes nothing: no lease, no state."""
    query = request_models.parse(DeliveryQuery, request.args.to_dict())
    found = the_inspection().delivery(delivery_id)
    poll = PollPayload(images=query.images, dummies=True)
    version = query.reward_version
    scores = scores_for(the_buffer().store, found.key, version) if version else None
    chunks = delivery_chunks(the_buffer(), found, poll, None, reward_version=version, scores=scores)
    return as_response(Answer(chunks))


@routes.get("/jobs/<id:job_id>/attempts")
def attempts(job_id: str) -> Response:
    """Lists the attempts of a job that failed, the last ended first."""
    page = request_models.parse(AttemptPageQuery, request.args.to_dict())
    return json_reply(failed_attempts(the_inspection().store, job_id, page))


@routes.get("/trajectories")
def trajectories() -> Response:
    """Lists trajectories without their payloads, newest first."""
    page = request_models.parse(TrajectoryPageQuery, request.args.to_dict())
    return json_reply(the_inspection().trajectories(page))


@routes.get("/trajectory_summary")
def trajectory_summary() -> Response:
    """Counts the trajectories that filters let through: their means, and a histogram of their rewards."""
    filters = request_models.parse(TrajectoryFilters, request.args.to_dict())
    return json_reply(the_inspection().summary(filters))


@routes.get("/search")
def search() -> Response:
    """Looks for a text in the messages of trajectories, newest first, as far as its time allows."""
    query = request_models.parse(SearchQuery, request.args.to_dict())
    return json_reply(the_context().text_search.page(query))


@routes.get("/trajectories/<id:uid>")
def trajectory(uid: str) -> Response:
    """Returns one trajectory as it is stored: messages, generations, rewards, timings."""
    query = request_models.parse(TrajectoryQuery, request.args.to_dict())
    found = the_inspection().trajectory(uid, query.job_id)
    body = found.body if query.generations else without_generations(found.body)
    if query.images == "inline":
        body = the_buffer().with_inline_images(body)
    return Response(orjson.dumps(found.light)[:-1] + b"," + body[1:], mimetype="application/json")


@routes.get("/metrics")
def metrics() -> Response:
    """Returns the numbers of the buffer in Prometheus' text format."""
    return Response(metrics_page(the_inspection(), SUPERVISOR.name), content_type=PROMETHEUS_TEXT)


@routes.get("/openapi.json")
def openapi() -> Response:
    """Returns the OpenAPI 3.1 document of all routes. Its schemas take longer to make than all else at a start."""
    from slime_plugins.rollout_buffer.openapi.document import openapi_document

    return json_reply(openapi_document())
