"""Which groups a job has, what a resumed trainer's skip list changes, and the states of both, which are stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.rules.job_states import next_state
from slime_plugins.rollout_buffer.rules.skip_list import KnownGroup, compare_with_skip_list
from slime_plugins.rollout_buffer.types import AckResult, AttemptState, DeliveryState, GroupState, JobState, WriteStatus

IDS = ["a", "b", "c"]


def known(key: int, state: GroupState, delivery: int | None = None, name: str = "a") -> KnownGroup:
    return KnownGroup(key=key, instance_id=name, state=state, delivery_key=delivery)


def test_what_was_delivered_but_not_consumed_becomes_ready_again() -> None:
    groups = [known(1, GroupState.DELIVERED, 1), known(2, GroupState.LEASED, 2), known(3, GroupState.OPEN)]
    resumption = compare_with_skip_list(groups, ["a"])
    assert resumption.ready_again == [2]
    assert resumption.skipped == []


def test_the_delivery_that_went_out_first_was_consumed_first_whatever_its_epoch() -> None:
    groups = [known(1, GroupState.OPEN), known(2, GroupState.DELIVERED, 1)]
    resumption = compare_with_skip_list(groups, ["a"])
    assert resumption.ready_again == []
    assert resumption.skipped == []


def test_a_consumed_group_whose_lease_ran_out_does_not_come_back() -> None:
    groups = [known(1, GroupState.READY, 1), known(2, GroupState.READY)]
    resumption = compare_with_skip_list(groups, ["a"])
    assert (resumption.consumed, resumption.ready_again, resumption.skipped) == ([1], [], [])
    assert compare_with_skip_list(groups, ["a", "a"]).skipped == [2]
    assert compare_with_skip_list(groups, []).ready_again == [1]


def test_a_filtered_group_uses_up_an_entry_only_if_it_was_reported() -> None:
    groups = [known(1, GroupState.FILTERED), known(2, GroupState.DELIVERED, 1)]
    assert compare_with_skip_list(groups, ["a"]).ready_again == []
    reported = [known(1, GroupState.FILTERED, 1), known(2, GroupState.DELIVERED, 1)]
    assert compare_with_skip_list(reported, ["a", "a"]).ready_again == []
    assert compare_with_skip_list(reported, []).reported_again == [1]


@given(
    st.lists(st.tuples(st.sampled_from(list(GroupState)), st.integers(1, 5), st.sampled_from(IDS)), max_size=20),
    st.lists(st.sampled_from(IDS), max_size=20),
)
def test_every_group_handed_out_is_either_consumed_or_comes_again(
    rows: list[tuple[GroupState, int, str]], skip: list[str]
) -> None:
    gone_out = {*GroupState} - {GroupState.OPEN, GroupState.SKIPPED}
    groups = [known(key, state, at if state in gone_out else None, name) for key, (state, at, name) in enumerate(rows)]
    resumption = compare_with_skip_list(groups, skip)
    for name in IDS:
        of_name = [group for group in groups if group.instance_id == name]
        again = {*resumption.ready_again, *resumption.reported_again}
        used = [
            group
            for group in of_name
            if group.state is not GroupState.OPEN and group.key not in again and group.delivery_key is not None
        ]
        skipped = [group for group in of_name if group.key in resumption.skipped]
        already = sum(group.state is GroupState.SKIPPED for group in of_name)
        assert len(used) == min(max(0, skip.count(name) - already), sum(g.delivery_key is not None for g in of_name))
        assert len(used) + len(skipped) <= skip.count(name)


def test_a_verb_leads_to_its_state_and_changes_nothing_when_repeated() -> None:
    assert next_state(JobState.RUNNING, "pause") is JobState.PAUSED
    assert next_state(JobState.PAUSED, "pause") is JobState.PAUSED
    assert next_state(JobState.PAUSED, "cancel") is JobState.CANCELLED
    with pytest.raises(ConflictError, match="a job that is finished cannot be resumed"):
        next_state(JobState.FINISHED, "resume")


# --- states ----------------------------------------------------------------------------------------------------------


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
