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
    """Number of the group, as in a delivered item."""
    epoch: int
    """Epoch of the input, from 0."""
    position: int | None
    """Line of its instance in the input, from 0."""
    instance_id: str
    """Id of the instance, one line of the input."""
    state: GroupState
    """Its state."""
    cause: str
    """The reason for being filtered, failed or skipped."""
    cause_code: CauseCode
    """Stable code of the cause; empty without one."""
    message: str
    """The cause as a sentence."""
    group_size: int
    """Slots of the group."""
    opened_at: float | None
    """Time of its first attempt or first item."""
    last_write_at: float | None
    """Time of its last trajectory, or of a later restart of its timeout."""
    closed_at: float | None
    """Time at which it closed."""
    delivery_id: str | None
    """Id of the delivery."""
    members: list[GroupMember]
    """Its trajectories in slot order, late ones included."""


class GroupPage(TypedDict):
    """A page of groups."""

    job_id: str
    """The job's id."""
    group_size: int
    """Slots of each group."""
    groups: list[GroupEntry]
    """In the requested order."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class FailedAttempt(TypedDict):
    """A failed attempt. It has no reward."""

    uid: str
    """Uid that its trajectory would have had, as in logs and traces."""
    group_index: int
    """Number of the group, as in a delivered item."""
    epoch: int
    """Epoch of the input, from 0."""
    instance_id: str
    """Id of the instance, one line of the input."""
    slot: int
    """Slot in the group, from 0."""
    attempt: int
    """Number of the attempt at the slot, from 1."""
    error_code: str | None
    """Stable code of the error."""
    error_message: str | None
    """Why it failed."""
    started_at: float
    """When it began."""
    ended_at: float
    """When it failed."""
    traceback: str | None
    """Traceback of the generator's error, for the newest attempts; null for other errors."""
    has_transcript: bool
    """True if its messages are stored, as for the newest attempts."""
    messages: list[dict[str, Any]] | None
    """Its stored messages with long texts shortened; only with `transcripts`."""


class FailedAttemptPage(TypedDict):
    """A page of attempts that failed."""

    job_id: str
    """The job's id."""
    log: str | None
    """Log file of the runner on the buffer host; null without a runner."""
    attempts: list[FailedAttempt]
    """Last ended first."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class GroupAttempt(TypedDict):
    """One attempt at a slot."""

    slot: int
    """Slot in the group, from 0."""
    attempt: int
    """Number of the attempt at the slot, from 1."""
    state: AttemptState
    """Its state."""
    error_code: str | None
    """Stable code of the error; null without one."""
    error_message: str | None
    """Message of the error."""
    started_at: float
    """When it began."""
    ended_at: float | None
    """Time of its end; null while it runs."""


class DeliveredGroupMember(TypedDict):
    """One member of a group as it is delivered."""

    source_uid: str | None
    """Uid of the trajectory that it was made from; null for a dummy."""
    reward: float | None
    """The reward for the trainer; null for a dummy."""
    raw_reward: float | None
    """The reward before normalisation, if it differs."""
    remove_sample: bool
    """True for a dummy in place of a missing member."""
    ordinal: int
    """Position in the delivered group, from 0."""
    uid: str
    """Uid of the delivered item."""


class Group(GroupEntry):
    """A group with its attempts, delivered members and instance."""

    job_id: str
    """The job's id."""
    task_type: str
    """The job's task type."""
    attempts: list[GroupAttempt]
    """All attempts at its slots, with errors."""
    delivered: list[DeliveredGroupMember]
    """Its members as they are delivered."""
    instance: dict[str, Any]
    """Its instance, the line of the input."""
