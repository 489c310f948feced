"""The bodies of ``get_rollout_data`` and ``ack``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.wire.request_fields import MAX_COUNT, Body, Count, Identifier, Number

MAX_WAIT_S = 300
"""Upper limit of `wait_s`."""


class PollPayload(Body):
    """The body of ``get_rollout_data``; ``{}`` pops everything that is ready, as it always did."""

    job_id: Identifier | None = None
    """Whose groups; may be left out while only one job has something to come."""
    batch_size: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = None
    """How many samples at most; whole groups, one at least (`meta_info.note` says when that is more)."""
    max_groups: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = None
    """How many groups at most; all that are ready when neither is given."""
    wait_s: Annotated[Number, Field(ge=0, le=MAX_WAIT_S)] = 0.0
    """How many seconds to wait when nothing is ready."""
    lease_s: Annotated[Number, Field(gt=0, le=7 * 86400)] | None = None
    """Leases the groups for so many seconds instead of handing them out for good: not acknowledged, they come back."""
    ack: Annotated[list[Identifier], Field(max_length=10_000)] = Field(default=[])
    """Deliveries that are acknowledged before this poll is answered."""
    consumer_id: Identifier | None = None
    """Who polls; together with `poll_id`."""
    poll_id: Identifier | None = None
    """One id per intended poll: the same pair gets the same delivery again."""
    images: Literal["inline", "hash"] = "inline"
    """Screenshots as data URIs, or by the hash under which `/images` has them."""
    dummies: bool | None = None
    """Members with `remove_sample` come too (true), or played ones alone (false); who leases gets them by default."""
    weight_version: Annotated[Count, Field(ge=0)] | None = None
    """The trainer's newest weight version. Staleness is measured by it, or by what the engine said if that is newer."""

    @property
    def knows_dummies(self) -> bool:
        """Returns True if members with ``remove_sample`` may be in the reply."""
        return self.lease_s is not None if self.dummies is None else self.dummies

    @model_validator(mode="after")
    def _asks_in_one_way(self) -> PollPayload:
        if self.batch_size is not None and self.max_groups is not None:
            raise ValueError("give batch_size (samples) or max_groups, not both")
        if (self.consumer_id is None) != (self.poll_id is None):
            raise ValueError("consumer_id and poll_id go together")
        return self


class AckPayload(Body):
    """The body of ``ack``: one delivery or several."""

    delivery_id: Identifier | None = None
    """The `delivery_id` of `meta_info`."""
    delivery_ids: Annotated[list[Identifier], Field(max_length=10_000)] = Field(default=[])
    """Several `delivery_id`s at once."""

    @model_validator(mode="after")
    def _names_a_delivery(self) -> AckPayload:
        if self.delivery_id is None and not self.delivery_ids:
            raise ValueError("delivery_id is missing: the one that get_rollout_data gave in meta_info")
        return self

    @property
    def all_ids(self) -> list[str]:
        """Every delivery that was named."""
        return [*([self.delivery_id] if self.delivery_id is not None else []), *self.delivery_ids]
