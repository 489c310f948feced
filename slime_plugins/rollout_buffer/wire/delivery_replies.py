"""Replies of what carries data: polls, writes, acknowledgements, past deliveries, screenshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.rules.groups import RewardStatistics
from slime_plugins.rollout_buffer.types import DeliveryState, WriteStatus
from slime_plugins.rollout_buffer.wire.items import Item


class Acknowledged(TypedDict):
    """What acknowledged deliveries were, by their ids."""

    acked: list[str]
    """Received, now or earlier."""
    expired: list[str]
    """Too late: their groups went out in another delivery; do not train them."""
    unknown: list[str]
    """Never heard of."""


class ShortGroup(TypedDict):
    """A delivered group with fewer members than it should have."""

    group_index: int
    """One per group."""
    instance_id: str
    """The line of the input that it belongs to."""
    members: int
    """Played members."""
    group_size: int
    """Slots of the group."""
    delivered: bool
    """False: too few are left, and the group has failed."""


class MetaInfo(RewardStatistics):
    """What a delivery says of itself and of the job, and what its generator says of the groups."""

    finished_groups: list[str]
    """instance_id of each group delivered, filtered or failed since the last one."""
    delivery_id: str | None
    """What to acknowledge; null when nothing was delivered."""
    job_id: NotRequired[str]
    """The job's id."""
    job_state: NotRequired[str]
    """Only when nothing was delivered."""
    job_cause: NotRequired[str]
    """Why the job is in that state, when there is a reason; only when nothing was delivered."""
    outcomes: dict[str, int]
    """Trajectories since the last delivery by outcome."""
    exhausted: bool
    """Nothing will ever be ready again, and nothing is leased to anybody else."""
    acknowledged: NotRequired[Acknowledged]
    """What became of the deliveries that the poll acknowledged."""
    reward_version: NotRequired[int]
    """Which rewards its trajectories have: 0 is what was played; left out when nothing was delivered."""
    weight_version: NotRequired[int | None]
    """The newest that is known in this run of the trainer."""
    stale_groups: NotRequired[list[int]]
    """`group_index` of groups that are too old, where `staleness_policy` is `flag`."""
    note: NotRequired[str]
    """What was done otherwise than asked: a `batch_size` below one group."""
    short_groups: NotRequired[list[ShortGroup]]
    """Groups with fewer members than they should have, for a client that takes no dummies."""


class DeliveredGroups(TypedDict):
    """The groups of a delivery."""

    data: list[Item]
    """Whole groups, one after the other."""
    meta_info: MetaInfo
    """What the delivery says of itself."""


class PollReply(TypedDict):
    """What a poll gets: whole groups; or `success: false` and no data when nothing is ready."""

    success: bool
    """False when nothing was ready; ask again."""
    message: str
    """A sentence for people."""
    data: DeliveredGroups
    """The groups, and what is said of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What became of one written item."""

    uid: str
    """Names the trajectory."""
    status: WriteStatus
    """stored; duplicate: it was there, nothing changed; late: kept, but its group had closed."""


class WriteReply(TypedDict):
    """What became of the items of one write."""

    success: bool
    """True unless something was refused."""
    message: str
    """A sentence for people."""
    job_id: str
    """The job's id."""
    results: list[WriteResult]
    """One per item, in order."""


class ImageReply(TypedDict):
    """A screenshot that is stored."""

    sha256: str
    """Of the bytes, in hex."""
    created: bool
    """False when it was there already."""


class DeliveryEntry(TypedDict):
    """One past delivery."""

    delivery_id: str
    """The delivery it is in."""
    state: DeliveryState
    """popped: handed out for good."""
    consumer_id: str | None
    """Who polled, where it said so."""
    poll_id: str | None
    """Which poll it was, where it said so."""
    created_at: float
    """Seconds since 1970, as all times."""
    lease_expires_at: float | None
    """When its groups come back unless it is acknowledged."""
    groups: int
    """How many groups."""
    samples: int
    """How many samples, dummies included."""


class DeliveryPage(TypedDict):
    """A page of deliveries."""

    job_id: str
    """The job's id."""
    deliveries: list[DeliveryEntry]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""
