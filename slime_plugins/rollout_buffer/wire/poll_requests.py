"""The bodies of ``get_rollout_data`` and ``ack``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.wire.request_fields import MAX_COUNT, Body, Count, Identifier, Number

MAX_WAIT_S = 300
"""Upper limit of `wait_s`."""


class PollPayload(Body):
    """The body of ``get_rollout_data``; ``{}`` pops everything that is ready, as in slime's buffer."""

    job_id: Identifier | None = None
    """The job; may be left out while only one has groups to deliver."""
    batch_size: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = None
    """Maximum number of samples, rounded down to whole groups; at least one group, then with a `meta_info.note`."""
    max_groups: Annotated[Count, Field(ge=1, le=MAX_COUNT)] | None = None
    """Maximum number of groups; without either limit all ready groups."""
    wait_s: Annotated[Number, Field(ge=0, le=MAX_WAIT_S)] = 0.0
    """Maximum seconds to wait for a ready group."""
    lease_s: Annotated[Number, Field(gt=0, le=7 * 86400)] | None = None
    """Lease of the groups in seconds; without an ack they are then delivered again. Default: no lease."""
    ack: Annotated[list[Identifier], Field(max_length=10_000)] = Field(default=[])
    """Deliveries to acknowledge before groups are taken."""
    consumer_id: Identifier | None = None
    """Id of the client, given with `poll_id`; its polls may overlap."""
    poll_id: Identifier | None = None
    """Id of this poll: a repeated (`consumer_id`, `poll_id`) gets the same delivery."""
    images: Literal["inline", "hash"] = "inline"
    """Screenshots as data URIs, or as hashes for `/images`."""
    dummies: bool | None = None
    """Whether dummies (`remove_sample`) are delivered. Default: only with a lease."""
    weight_version: Annotated[Count, Field(ge=0)] | None = None
    """The trainer's newest weight version. Staleness is relative to it, or to the engine's version if that is newer."""

    @property
    def takes_dummies(self) -> bool:
        """True if members with ``remove_sample`` may be in the reply."""
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
    """`meta_info.delivery_id` of the delivery."""
    delivery_ids: Annotated[list[Identifier], Field(max_length=10_000)] = Field(default=[])
    """Several `delivery_id`s at once."""

    @model_validator(mode="after")
    def _names_a_delivery(self) -> AckPayload:
        if self.delivery_id is None and not self.delivery_ids:
            raise ValueError("delivery_id is missing: it is in the meta_info of get_rollout_data's reply")
        return self
