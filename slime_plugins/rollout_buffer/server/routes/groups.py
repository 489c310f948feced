"""Routes of groups."""

from __future__ import annotations

from flask import Blueprint, Response, request

from slime_plugins.rollout_buffer.errors import (
    NotFoundError,
)
from slime_plugins.rollout_buffer.server.http import (
    json_or_unchanged,
    the_context,
)
from slime_plugins.rollout_buffer.wire.query_params import (
    GroupPageQuery,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse

routes = Blueprint("rollout_buffer_groups", __name__)


@routes.get("/jobs/<id:job_id>/groups")
def groups(job_id: str) -> Response:
    """Lists a job's groups, the last touched first."""
    page = parse(GroupPageQuery, request.args.to_dict())
    return json_or_unchanged(the_context().views.groups(job_id, page))


@routes.get("/groups/<int:group_index>")
def group(group_index: int) -> Response:
    """Returns one group with its members, its attempts and what was delivered."""
    if group_index >= 2**63:
        raise NotFoundError(f"there is no group {str(group_index)[:40]}")
    return json_or_unchanged(the_context().views.group(group_index))
