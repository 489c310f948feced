"""What a caller may put after the question mark of a route that only looks, validated like a body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.payloads import Body, Count, Identifier, Number
from slime_plugins.rollout_buffer.types import Outcome, StopReason

__all__ = ["DeliveryQuery", "PageQuery", "TrajectoryPageQuery", "TrajectoryQuery"]

MAX_KEY = 2**63 - 1


class PageQuery(Body):
    """One page of a list, newest first."""

    limit: Annotated[Count, Field(ge=1, le=1000)] = 50
    """How many entries at most."""
    cursor: Annotated[Count, Field(ge=1, le=MAX_KEY)] | None = None
    """The `next_cursor` of the page before; the first page when it is left out."""


class TrajectoryPageQuery(PageQuery):
    """One page of trajectories; every filter that is given must hold."""

    job_id: Identifier | None = None
    """Only those of this job."""
    instance_id: Identifier | None = None
    """Only those of this instance."""
    outcome: Outcome | None = None
    """Only those that ended so."""
    stop_reason: StopReason | None = None
    """Only those that stopped for this reason."""
    min_reward: Number | None = None
    """Only those with at least this reward."""
    max_reward: Number | None = None
    """Only those with at most this reward."""

    @model_validator(mode="after")
    def _has_a_range(self) -> TrajectoryPageQuery:
        if self.min_reward is not None and self.max_reward is not None and self.min_reward > self.max_reward:
            raise ValueError("min_reward is larger than max_reward: nothing can lie between them")
        return self


class TrajectoryQuery(Body):
    """Which trajectory of that uid, and in which form."""

    job_id: Identifier | None = None
    """The job it belongs to; needed only when several jobs have that uid."""
    images: Literal["inline", "hash"] = "hash"
    """Screenshots as data URIs, or by the hash under which `/images` has them."""


class DeliveryQuery(Body):
    """In which form a past delivery is returned."""

    images: Literal["inline", "hash"] = "inline"
    """As in the poll that got it: screenshots as data URIs, or by hash."""
