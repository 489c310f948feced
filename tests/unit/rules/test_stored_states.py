"""States as data directories hold them, and as HTTP names them: they cannot be respelled."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.rules.job_states import next_state
from slime_plugins.rollout_buffer.types import AckResult, AttemptState, DeliveryState, GroupState, JobState, WriteStatus


@pytest.mark.parametrize(
    ("states", "spelling"),
    [
        (JobState, "running paused finished cancelled failed"),
        (GroupState, "open ready leased delivered filtered failed skipped"),
        (AttemptState, "running finished failed given_up"),
        (DeliveryState, "leased acked popped expired"),
        (AckResult, "acked expired unknown"),
        (WriteStatus, "stored duplicate late"),
    ],
)
def test_states_are_spelled_as_they_are_stored(states: type[GroupState], spelling: str) -> None:
    assert [state.value for state in states] == spelling.split()


@pytest.mark.parametrize("state", JobState)
def test_only_a_failed_job_is_opened_again(state: JobState) -> None:
    if state in (JobState.FAILED, JobState.RUNNING):
        assert next_state(state, "reopen") is JobState.RUNNING
    else:
        with pytest.raises(ConflictError, match="cannot be reopened"):
            next_state(state, "reopen")
