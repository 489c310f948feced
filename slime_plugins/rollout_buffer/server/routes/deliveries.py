"""Routes of deliveries: acknowledge, list, show. ``poll`` creates them."""

from __future__ import annotations

from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer.errors import (
    NotFoundError,
)
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.server.http import (
    Answer,
    as_response,
    json_reply,
    read_body,
    the_buffer,
    the_inspection,
)
from slime_plugins.rollout_buffer.state.reward_versions import scores_for
from slime_plugins.rollout_buffer.wire.delivery_requests import AckPayload, PollPayload
from slime_plugins.rollout_buffer.wire.query_params import (
    DeliveryQuery,
    PageQuery,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse

routes = Blueprint("rollout_buffer_deliveries", __name__)


@routes.post("/ack")
def ack() -> Response:
    """Counts deliveries as received."""
    payload = parse(AckPayload, read_body())
    result = the_buffer().acknowledge(payload.all_ids)
    if result["unknown"] and not result["acked"] and not result["expired"]:
        raise NotFoundError(f"there is no delivery {result['unknown'][0]!r}", result)
    return json_reply(result)


@routes.get("/jobs/<id:job_id>/deliveries")
def deliveries(job_id: str) -> Response:
    """Lists a job's deliveries, newest first."""
    page = parse(PageQuery, request.args.to_dict())
    return json_reply(the_inspection().deliveries(job_id, page))


@routes.get("/deliveries/<id:delivery_id>")
def delivery(delivery_id: str) -> Response:
    """Returns a past delivery as its poll got it, with its dummies. Changes nothing: no lease, no state."""
    query = parse(DeliveryQuery, request.args.to_dict())
    found = the_inspection().delivery(delivery_id)
    poll = PollPayload(images=query.images, dummies=True)
    version = query.reward_version
    scores = scores_for(the_buffer().store, found.key, version) if version else None
    chunks = delivery_chunks(the_buffer(), found, poll, None, reward_version=version, scores=scores)
    return as_response(Answer(chunks))
