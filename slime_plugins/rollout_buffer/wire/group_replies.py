"""Replies on groups, their members and attempts."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.types import AttemptState, GroupState
from slime_plugins.rollout_buffer.wire.trajectory_replies import GroupMember


class GroupEntry(TypedDict):
    """A group and the rewards of its members."""

    group_index: int
    """As in a delivered item."""
    epoch: int
    """Which pass over the input, from 0."""
    position: int | None
    """Line of its instance in the input, from 0."""
    instance_id: str
    """The line of the input that it belongs to."""
    state: GroupState
    """Where it stands."""
    cause: str
    """Why it was filtered, failed or skipped."""
    cause_code: CauseCode
    """The same for programs: one of a few stable codes, or empty."""
    message: str
    """The same as a sentence for people."""
    group_size: int
    """Slots of the group."""
    opened_at: float | None
    """When its first attempt began or its first item came."""
    last_write_at: float | None
    """When a trajectory of it came last."""
    closed_at: float | None
    """When it was judged."""
    delivery_id: str | None
    """The delivery it is in."""
    members: list[GroupMember]
    """Its trajectories in slot order."""


class GroupPage(TypedDict):
    """A page of groups."""

    job_id: str
    """The job's id."""
    group_size: int
    """Slots of the group."""
    groups: list[GroupEntry]
    """The last touched first."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class FailedAttempt(TypedDict):
    """An attempt that died of its surroundings. It has no reward."""

    uid: str
    """Names what it would have brought, in logs and traces."""
    group_index: int
    """As in a delivered item."""
    epoch: int
    """Which pass over the input, from 0."""
    instance_id: str
    """The line of the input that it belongs to."""
    slot: int
    """Place in the group, from 0."""
    attempt: int
    """Which try to fill its slot, from 1."""
    error_code: str | None
    """The same for programs: a stable code."""
    error_message: str | None
    """Why it failed."""
    started_at: float
    """When it began."""
    ended_at: float
    """When it failed."""
    traceback: str | None
    """Where its generator raised; of the newest, and null where something else failed."""
    has_transcript: bool
    """Whether what was said in it was kept: that of the newest is."""
    messages: list[dict[str, Any]] | None
    """What was said in it, long texts shortened, where `transcripts` asks for it and it was kept."""


class FailedAttemptPage(TypedDict):
    """A page of attempts that failed."""

    job_id: str
    """The job's id."""
    log: str | None
    """The file on the buffer's host in which its runner logs; null where nothing is played here."""
    attempts: list[FailedAttempt]
    """The last ended first."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class GroupAttempt(TypedDict):
    """One try to fill a slot."""

    slot: int
    """Place in the group, from 0."""
    attempt: int
    """Which try to fill its slot, from 1."""
    state: AttemptState
    """Where it stands."""
    error_code: str | None
    """Why it failed, for programs; null where it did not."""
    error_message: str | None
    """The same for people."""
    started_at: float
    """When it began."""
    ended_at: float | None
    """When it ended; null while it runs."""


class DeliveredGroupMember(TypedDict):
    """One place of a group as a trainer is given it."""

    source_uid: str | None
    """The trajectory it was made of; null for a dummy."""
    reward: float | None
    """What the trainer is to use; null for a dummy."""
    raw_reward: float | None
    """What the episode earned, when that differs."""
    remove_sample: bool
    """A dummy that stands for a missing member."""
    ordinal: int
    """Place in what is delivered, from 0."""
    uid: str
    """Names the trajectory."""


class Group(GroupEntry):
    """A group with all that is known of it."""

    job_id: str
    """The job's id."""
    task_type: str
    """Which generator plays it."""
    attempts: list[GroupAttempt]
    """Every try to fill a slot, with its error when it failed."""
    delivered: list[DeliveredGroupMember]
    """What a trainer is given."""
    instance: dict[str, Any]
    """Its line of the input."""
