"""Routes of groups."""

from __future__ import annotations

from slime_plugins.rollout_buffer.errors import NotFoundError
from slime_plugins.rollout_buffer.server.http import the_context
from slime_plugins.rollout_buffer.server.routing import Routes
from slime_plugins.rollout_buffer.wire.group_replies import Group, GroupPage
from slime_plugins.rollout_buffer.wire.query_params import GroupPageQuery

routes = Routes("groups")


@routes.get("/jobs/{job_id}/groups", revalidated=True)
def groups(job_id: str, page: GroupPageQuery) -> GroupPage:
    """Search groups.

    Sorted by the last change, newest first, or by `sort` and `order`; with their causes and the rewards of
    members. Open groups are listed once they are the next to be played.
    """
    return the_context().views.groups(job_id, page)


@routes.get("/groups/{group_index}", revalidated=True)
def group(group_index: int) -> Group:
    """Show a group.

    Returns its members, every attempt to fill a slot, and what was delivered.
    """
    if group_index >= 2**63:
        raise NotFoundError(f"there is no group {str(group_index)[:40]}")
    return the_context().views.group(group_index)
