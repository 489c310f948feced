"""Pure: state transitions of a job, and its final state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause, CauseCode, CountedCause
from slime_plugins.rollout_buffer.types import GroupState, JobState

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


def next_state(current: JobState, verb: str) -> JobState:
    """Returns the state after ``verb``; the same state if it has been reached already (pause a paused job).

    Raises:
        ConflictError: there is no such transition from the current state.
    """
    allowed, target = _TRANSITIONS[verb]
    if current is target:
        return current
    if current not in allowed:
        raise ConflictError(f"a job that is {current.value} cannot be {_DONE[verb]}", {"state": current.value})
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempts:
    """Numbers of failed and ended attempts of a job. ``code`` is the most frequent error code: ``of_code`` attempts
    failed with it, one of them with ``message``."""

    failed: int
    ended: int
    code: str
    of_code: int
    message: str

    def sentence(self) -> str:
        """Returns a message for people."""
        of_them = "" if self.of_code == self.failed else f", {self.of_code} of them with {self.code}"
        return f"{self.failed} of {self.ended} attempts failed{of_them}: {self.message or self.code}"


def ending_of(
    groups: Mapping[GroupState, int], commonest: Mapping[GroupState, CountedCause], failures: FailedAttempts | None
) -> tuple[JobState, Cause]:
    """Returns the final state of a job whose groups are all closed, with a cause if no group could be delivered.

    ``commonest`` has the most frequent cause of filtered and of failed groups.
    """
    if any(groups.get(state) for state in (GroupState.READY, GroupState.LEASED, GroupState.DELIVERED)):
        return JobState.FINISHED, NO_CAUSE
    failed, filtered = (groups.get(state, 0) for state in (GroupState.FAILED, GroupState.FILTERED))
    if failed:
        most = commonest[GroupState.FAILED]
        if failures is not None and most.cause.code is CauseCode.SLOTS_FAILED:
            return JobState.FAILED, Cause(CauseCode.ATTEMPTS_FAILED, failures.sentence())
        message = f"none of {failed + filtered} groups could be delivered{_commonest(most, failed + filtered)}"
        return JobState.FAILED, Cause(CauseCode.NO_GROUP_READY, message)
    if filtered:
        were = "the only group was" if filtered == 1 else f"all {filtered} groups were"
        message = f"{were} filtered{_commonest(commonest[GroupState.FILTERED], filtered)}"
        return JobState.FINISHED, Cause(CauseCode.NO_GROUP_READY, message)
    return JobState.FINISHED, NO_CAUSE


def _commonest(most: CountedCause, groups: int) -> str:
    of_them = "" if most.count == groups else f", {most.count} of them"
    return f"{of_them}: {most.cause.message}"
