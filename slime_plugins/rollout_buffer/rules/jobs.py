"""Pure: which groups a job has, which of them a resumed trainer does not want again, and how a job may change state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause, CauseCode, CountedCause
from slime_plugins.rollout_buffer.types import GroupState, JobState

__all__ = [
    "FINAL_STATES",
    "OPEN_STATES",
    "FailedAttempts",
    "KnownGroup",
    "PlannedGroup",
    "Resumption",
    "attempt_uid",
    "ending_of",
    "next_state",
    "plan_groups",
    "wanted_again",
]

OPEN_STATES = frozenset({JobState.RUNNING, JobState.PAUSED})
FINAL_STATES = frozenset({JobState.FINISHED, JobState.CANCELLED, JobState.FAILED})

_TRANSITIONS: Mapping[str, tuple[frozenset[JobState], JobState]] = {
    "pause": (frozenset({JobState.RUNNING}), JobState.PAUSED),
    "drain": (frozenset({JobState.RUNNING}), JobState.PAUSED),
    "resume": (frozenset({JobState.PAUSED}), JobState.RUNNING),
    "cancel": (OPEN_STATES, JobState.CANCELLED),
    "reopen": (frozenset({JobState.FAILED}), JobState.RUNNING),
}
_DONE = {"pause": "paused", "drain": "drained", "resume": "resumed", "cancel": "cancelled", "reopen": "reopened"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedGroup:
    """One (epoch, instance) of a job; ``position`` is the instance's line, from 0."""

    epoch: int
    position: int
    skipped: bool


def plan_groups(
    instance_ids: Sequence[str], num_epoch: int, skip_instance_ids: Iterable[str]
) -> Iterator[PlannedGroup]:
    """Yields every group of a job, epoch by epoch in file order.

    Each occurrence of an id in the skip list skips that instance in one epoch, the earliest first: the list is what the
    trainer consumed, and it consumed the earliest epochs first.
    """
    to_skip = Counter(skip_instance_ids)
    for epoch in range(num_epoch):
        for position, instance_id in enumerate(instance_ids):
            skipped = to_skip[instance_id] > 0
            if skipped:
                to_skip[instance_id] -= 1
            yield PlannedGroup(epoch=epoch, position=position, skipped=skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGroup:
    """A stored group as ``wanted_again`` needs it.

    ``delivery_key`` is the delivery it went out or was reported in. ``by_skip_list`` says that an earlier skip list
    skipped it, and nobody else.
    """

    key: int
    instance_id: str
    state: GroupState
    delivery_key: int | None
    by_skip_list: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """What a resumed trainer's skip list changes, as group keys."""

    ready_again: list[int]
    """Handed out, but not consumed: they are delivered once more, also those that have come back by themselves."""
    reported_again: list[int]
    """Filtered or failed, and the report of it was lost: they are reported once more."""
    skipped: list[int]
    """Still to come, but consumed already."""
    consumed: list[int]
    """Consumed, though their lease ran out unacknowledged: they do not come back."""
    not_skipped: list[int] = field(default_factory=list)
    """Skipped by an earlier list: the trainer has gone back to before it consumed them."""


def wanted_again(groups: Sequence[KnownGroup], skip_instance_ids: Iterable[str]) -> Resumption:
    """Compares what was handed out with what a resumed trainer says it consumed.

    Entries of the skip list are used up in the order in which the trainer can have collected them: groups skipped from
    the start, then deliveries in their order (filtered and failed groups were reported in one), and only then groups
    to come, earliest first. ``groups`` are in epoch order.
    """
    to_skip = Counter(skip_instance_ids)

    def use_entry(group: KnownGroup) -> bool:
        if to_skip[group.instance_id] <= 0:
            return False
        to_skip[group.instance_id] -= 1
        return True

    skipped_before = (group for group in groups if group.state is GroupState.SKIPPED)
    not_skipped = [group.key for group in skipped_before if not use_entry(group) and group.by_skip_list]
    gone_out = sorted((group for group in groups if group.delivery_key is not None), key=_delivery_order)
    unused = [group for group in gone_out if group.state is not GroupState.SKIPPED and not use_entry(group)]
    not_consumed = {group.key for group in unused}
    came_back = [group.key for group in gone_out if group.state is GroupState.READY]
    to_come = (group for group in groups if group.state in (GroupState.OPEN, GroupState.READY))
    skipped = [group.key for group in to_come if group.delivery_key is None and use_entry(group)]
    handed_out = (GroupState.LEASED, GroupState.DELIVERED, GroupState.READY)
    return Resumption(
        ready_again=[group.key for group in unused if group.state in handed_out],
        reported_again=[group.key for group in unused if group.state in (GroupState.FILTERED, GroupState.FAILED)],
        skipped=skipped,
        consumed=[key for key in came_back if key not in not_consumed],
        not_skipped=not_skipped,
    )


def _delivery_order(group: KnownGroup) -> tuple[int, int]:
    return group.delivery_key or 0, group.key


def next_state(current: JobState, verb: str) -> JobState:
    """Returns the state after ``verb``; a verb that changes nothing (pause a paused job) returns the same state.

    Raises:
        ConflictError: the job is in a state that the verb cannot leave.
    """
    allowed, target = _TRANSITIONS[verb]
    if current is target:
        return current
    if current not in allowed:
        raise ConflictError(f"a job that is {current.value} cannot be {_DONE[verb]}", {"state": current.value})
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempts:
    """How many attempts of a job failed of those that ended, and the commonest error with an example of it."""

    failed: int
    ended: int
    code: str
    of_code: int
    message: str

    def sentence(self) -> str:
        """Says it in one sentence."""
        of_them = "" if self.of_code == self.failed else f", {self.of_code} of them with {self.code}"
        return f"{self.failed} of {self.ended} attempts failed{of_them}: {self.message or self.code}"


def ending_of(
    groups: Mapping[GroupState, int], commonest: Mapping[GroupState, CountedCause], failures: FailedAttempts | None
) -> tuple[JobState, Cause]:
    """Returns how a job ends whose groups are all closed, and why, when none of them could be delivered.

    ``commonest`` is the cause that most filtered and most failed groups have.
    """
    if any(groups.get(state) for state in (GroupState.READY, GroupState.LEASED, GroupState.DELIVERED)):
        return JobState.FINISHED, NO_CAUSE
    failed, filtered = (groups.get(state, 0) for state in (GroupState.FAILED, GroupState.FILTERED))
    if failed:
        most = commonest[GroupState.FAILED]
        if failures is not None and most.cause.code in (CauseCode.SLOTS_FAILED, CauseCode.TIMED_OUT):
            return JobState.FAILED, Cause(CauseCode.ATTEMPTS_FAILED, failures.sentence())
        message = f"none of {failed + filtered} groups could be delivered: {_counted(most)}"
        return JobState.FAILED, Cause(CauseCode.NO_GROUP_READY, message)
    if filtered:
        message = f"all {filtered} groups were filtered: {_counted(commonest[GroupState.FILTERED])}"
        return JobState.FINISHED, Cause(CauseCode.NO_GROUP_READY, message)
    return JobState.FINISHED, NO_CAUSE


def _counted(most: CountedCause) -> str:
    return f"{most.cause.message} ({most.count} of them)"


def attempt_uid(job_key: int, epoch: int, position: int, slot: int, attempt: int) -> str:
    """Names the trajectory of one attempt; unique in the whole store."""
    return f"{job_key}.{epoch}.{position}.{slot}.{attempt}"
