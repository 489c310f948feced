"""Replies on data: polls, writes, acknowledgements, past deliveries, screenshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.rules.groups import RewardStatistics
from slime_plugins.rollout_buffer.types import DeliveryState, WriteStatus
from slime_plugins.rollout_buffer.wire.items import Item


class Acknowledged(TypedDict):
    """Results of acknowledgements: delivery ids."""

    acked: list[str]
    """Acknowledged now or earlier."""
    expired: list[str]
    """Too late: their groups were delivered to another consumer; do not train them."""
    unknown: list[str]
    """Unknown ids."""


class ShortGroup(TypedDict):
    """A group with fewer members than slots."""

    group_index: int
    """Number of the group, unique in the buffer."""
    instance_id: str
    """Id of the instance, one line of the input."""
    members: int
    """Number of played members."""
    group_size: int
    """Slots of the group."""
    delivered: bool
    """False if the group failed because too few members are left."""


class MetaInfo(RewardStatistics):
    """Statistics of a delivery and its job, with those of the generator."""

    finished_groups: list[str]
    """instance_id of each group of this delivery, and of each that was filtered or failed since the last delivery."""
    ended_groups: NotRequired[list[int]]
    """`group_index` of the filtered and failed groups, which `finished_groups` names first."""
    delivery_id: str | None
    """Id to acknowledge; null if nothing was delivered."""
    job_id: NotRequired[str]
    """The job's id."""
    job_state: NotRequired[str]
    """State of the job; only if nothing was delivered."""
    job_cause: NotRequired[str]
    """The reason for that state, if there is one; only if nothing was delivered."""
    outcomes: dict[str, int]
    """Trajectories since the last delivery by outcome."""
    exhausted: bool
    """True if no group can become ready any more and none is leased to another consumer."""
    acknowledged: NotRequired[Acknowledged]
    """Results of the poll's acknowledgements."""
    reward_version: NotRequired[int]
    """Version of the rewards: 0 are the played ones; absent if nothing was delivered."""
    weight_version: NotRequired[int | None]
    """The newest weight version of the trainer's present run."""
    stale_groups: NotRequired[list[int]]
    """`group_index` of the delivered groups that are too old; none with `staleness_policy: drop`."""
    note: NotRequired[str]
    """Deviation from the request: `batch_size` is below one group."""
    short_groups: NotRequired[list[ShortGroup]]
    """Groups with fewer members than slots; only if dummies are not delivered."""


class DeliveredGroups(TypedDict):
    """The groups of a delivery."""

    data: list[Item]
    """Items of whole groups, group by group."""
    meta_info: MetaInfo
    """Statistics of the delivery."""


class PollReply(TypedDict):
    """Reply to a poll: whole groups, or `success: false` without data if none is ready."""

    success: bool
    """False if no group was ready."""
    message: str
    """A sentence for people."""
    data: DeliveredGroups
    """The groups and their statistics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """Result of one written item."""

    uid: str
    """Id of the trajectory."""
    status: WriteStatus
    """`stored`; `duplicate`: it was stored before; `late`: stored, but its group had closed or had no free slot."""


class WriteReply(TypedDict):
    """Results of one write."""

    success: bool
    """Always true: a request with a refused item gets an error instead."""
    message: str
    """A sentence for people."""
    job_id: str
    """The job's id."""
    results: list[WriteResult]
    """One result per item, in order."""


class ImageReply(TypedDict):
    """A screenshot that is stored."""

    sha256: str
    """sha256 of the bytes, hexadecimal."""
    created: bool
    """False if it was stored before."""


class DeliveryEntry(TypedDict):
    """One past delivery."""

    delivery_id: str
    """Id of the delivery."""
    state: DeliveryState
    """`popped`: delivered without a lease."""
    consumer_id: str | None
    """`consumer_id` of the poll, if it had one."""
    poll_id: str | None
    """`poll_id` of the poll, if it had one."""
    created_at: float
    """Seconds since 1970, as all times."""
    lease_expires_at: float | None
    """Time at which its groups become deliverable again without an acknowledgement."""
    groups: int
    """Number of groups."""
    samples: int
    """Number of samples, dummies included."""


class DeliveryPage(TypedDict):
    """A page of deliveries."""

    job_id: str
    """The job's id."""
    deliveries: list[DeliveryEntry]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""
