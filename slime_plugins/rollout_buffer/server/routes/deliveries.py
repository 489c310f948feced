"""Routes of deliveries: acknowledge, list, show. ``poll`` creates them."""

from __future__ import annotations

from flask import Response

from slime_plugins.rollout_buffer.errors import NotFoundError
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.server.http import Answer, as_response, the_buffer, the_inspection
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.state.reward_versions import scores_for
from slime_plugins.rollout_buffer.wire.delivery_replies import Acknowledged, DeliveryPage, PollReply
from slime_plugins.rollout_buffer.wire.poll_requests import AckPayload, PollPayload
from slime_plugins.rollout_buffer.wire.query_params import DeliveryQuery, PageQuery

routes = Routes("deliveries")


@routes.post("/ack", errors=(404,))
def ack(payload: AckPayload) -> Acknowledged:
    """Acknowledge deliveries.

    Groups of deliveries in `expired` belong to another delivery now: do not train them. Give `delivery_id`,
    `delivery_ids` or both. Repeating an acknowledgement changes nothing.
    """
    single = [] if payload.delivery_id is None else [payload.delivery_id]
    result = the_buffer().acknowledge([*single, *payload.delivery_ids])
    if result["unknown"] and not result["acked"] and not result["expired"]:
        raise NotFoundError(f"there is no delivery {result['unknown'][0]!r}", result)
    return result


@routes.get("/jobs/{job_id}/deliveries")
def deliveries(job_id: str, page: PageQuery) -> DeliveryPage:
    """List a job's deliveries.

    The newest comes first; expired deliveries are included.
    """
    return the_inspection().deliveries(job_id, page)


@routes.get("/deliveries/{delivery_id}", reply=PollReply)
def delivery(delivery_id: str, query: DeliveryQuery) -> Response:
    """Show a past delivery.

    Returns the same bytes as the reply to its poll, but always with dummies, and without `acknowledged`.
    Changes no lease and no state.
    """
    past = the_inspection().delivery(delivery_id)
    poll = PollPayload(images=query.images, dummies=True)
    version = query.reward_version
    scores = scores_for(the_buffer().store, past.key, version) if version else None
    chunks = delivery_chunks(the_buffer(), past, poll, None, reward_version=version, scores=scores)
    return as_response(Answer(chunks))
