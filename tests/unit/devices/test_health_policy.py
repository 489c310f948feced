"""When a device is lent again, rests, is recycled or replaced: pure decisions, for any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.devices.counters import DeviceCounters
from slime_plugins.rollout_buffer.devices.health_policy import HealthAction, HealthPolicy, HealthRecord, may_quarantine
from slime_plugins.rollout_buffer.devices.leased_device import LeaseReport

CLEAN = LeaseReport()
FAULT = LeaseReport(fault="error", failures={"device": 1})
HUNG = LeaseReport(fault="hung", failures={"hung": 1})
DIED = LeaseReport(fault="died", failures={"died": 1})
BAD_TASK = LeaseReport(failures={"environment_setup": 1})
UNCALLED = LeaseReport(called=False)

reports = st.sampled_from([CLEAN, FAULT, HUNG, DIED, BAD_TASK, UNCALLED])
rules_of_any_kind = st.builds(
    HealthPolicy,
    max_consecutive_faults=st.integers(1, 4),
    quarantine_s=st.floats(0.1, 100),
    recycle_after_episodes=st.none() | st.integers(1, 20),
)


def rules(*, faults: int = 2, recycle: int | None = None) -> HealthPolicy:
    return HealthPolicy(max_consecutive_faults=faults, quarantine_s=10, recycle_after_episodes=recycle)


def decided(
    record: HealthRecord, by: HealthPolicy, *, may_quarantine: bool = True, may_recycle: bool = True
) -> HealthAction:
    return by.decide(record, may_quarantine=may_quarantine, may_recycle=may_recycle)


def after(*history: LeaseReport, record: HealthRecord | None = None) -> HealthRecord:
    record = record or HealthRecord()
    for report in history:
        record = record.after(report)
    return record


def looked_after(record: HealthRecord, care: HealthAction) -> HealthRecord:
    """What the manager makes of a record once the device got what it needs."""
    if care is HealthAction.QUARANTINE:
        return record.after_quarantine()
    if care is HealthAction.LEND:
        return record
    return record.with_new_worker(after_failure=care is HealthAction.REPLACE)


def test_a_device_that_was_not_restored_rests_at_once_and_is_replaced_if_it_is_not_restored_then() -> None:
    not_restored = LeaseReport(fault="not_restored", failures={"not_restored": 1})
    spoiled = after(not_restored)
    assert decided(spoiled, rules(faults=3)) is HealthAction.QUARANTINE
    assert decided(after(not_restored, record=spoiled.after_quarantine()), rules(faults=3)) is HealthAction.REPLACE
    counted = LeaseReport(failures={"not_restored": 1})
    assert after(counted) == after(CLEAN)


@given(rules_of_any_kind, st.lists(reports, max_size=60), st.booleans())
def test_no_device_fails_more_often_in_a_row_than_it_may_before_something_is_done(
    by: HealthPolicy, history: list[LeaseReport], resting_allowed: bool
) -> None:
    record, lent_with_faults = HealthRecord(), 0
    for report in history:
        record = record.after(report)
        if report.fault is not None:
            lent_with_faults += 1
        elif report is CLEAN:
            lent_with_faults = 0
        care = decided(record, by, may_quarantine=resting_allowed)
        if care is HealthAction.LEND:
            assert lent_with_faults < by.max_consecutive_faults
            assert not record.gone
        else:
            lent_with_faults = 0
        assert care is not HealthAction.QUARANTINE or resting_allowed
        record = looked_after(record, care)


@given(rules_of_any_kind, st.lists(reports, max_size=60))
def test_a_device_that_hung_or_died_is_never_lent_as_it_is(by: HealthPolicy, history: list[LeaseReport]) -> None:
    for last in (HUNG, DIED):
        assert decided(after(*history, last), by) is HealthAction.REPLACE


@given(rules_of_any_kind, st.lists(reports, max_size=60))
def test_one_clean_episode_makes_everything_good(by: HealthPolicy, history: list[LeaseReport]) -> None:
    record = HealthRecord()
    for report in history:
        record = record.after(report)
        record = looked_after(record, decided(record, by))
    good = record.after(CLEAN)
    assert good == HealthRecord(episodes=good.episodes)
    assert by.quarantine_before_new_worker_s(good) == 0
    assert decided(good, by) in (HealthAction.LEND, HealthAction.RECYCLE)


@given(rules_of_any_kind, st.lists(reports, max_size=80))
def test_rests_grow_with_trouble_but_have_an_end(by: HealthPolicy, history: list[LeaseReport]) -> None:
    record, longest = HealthRecord(), 0.0
    for report in history:
        record = record.after(report)
        care = decided(record, by)
        rest = by.quarantine_before_new_worker_s(record)
        longest = max(longest, rest)
        assert rest <= 16 * by.quarantine_s
        record = looked_after(record, care)
    assert longest == 0 or longest >= by.quarantine_s


@given(rules_of_any_kind, st.lists(st.sampled_from([CLEAN, BAD_TASK, UNCALLED]), max_size=60))
def test_a_device_without_faults_is_never_punished(by: HealthPolicy, history: list[LeaseReport]) -> None:
    record = HealthRecord()
    for report in history:
        record = record.after(report)
        care = decided(record, by)
        assert care in (HealthAction.LEND, HealthAction.RECYCLE)
        record = looked_after(record, care)


@given(resting=st.integers(0, 50), devices=st.integers(1, 50))
def test_at_most_half_of_the_devices_rest(resting: int, devices: int) -> None:
    if may_quarantine(resting, devices):
        assert resting + 1 <= devices / 2
    assert not may_quarantine(0, 1)


def test_first_quarantine_then_probation_then_a_new_worker_then_rests_that_double() -> None:
    by = rules(faults=2)
    record = after(FAULT)
    assert decided(record, by) is HealthAction.LEND
    record = after(FAULT, record=record)
    assert decided(record, by) is HealthAction.QUARANTINE
    record = record.after_quarantine()
    assert decided(record, by) is HealthAction.LEND
    record = after(FAULT, record=record)
    assert decided(record, by) is HealthAction.REPLACE
    rests = []
    for _ in range(7):
        rests.append(by.quarantine_before_new_worker_s(record))
        record = after(FAULT, FAULT, record=record.with_new_worker(after_failure=True))
        assert decided(record, by) is HealthAction.REPLACE
    assert rests == [0, 10, 20, 40, 80, 160, 160]


def test_a_device_is_recycled_by_its_number_of_episodes_as_soon_as_it_may() -> None:
    by = rules(recycle=3)
    record = after(CLEAN, CLEAN, UNCALLED)
    assert decided(record, by) is HealthAction.LEND
    record = after(BAD_TASK, record=record)
    assert decided(record, by, may_recycle=False) is HealthAction.LEND
    record = after(CLEAN, record=record)
    assert decided(record, by) is HealthAction.RECYCLE
    assert record.with_new_worker(after_failure=False) == HealthRecord()


def test_counters_hold_the_latest_times_only_and_leave_out_leases_without_a_call() -> None:
    counters = DeviceCounters()
    counters.add(LeaseReport(called=False, held_s=100))
    assert counters.as_dict()["actions_per_minute"] is None
    for number in range(3000):
        counters.add(LeaseReport(reset_s=(float(number),), step_s=(1.0, 2.0, 3.0, 100.0), held_s=60.0))
    counted = counters.as_dict()
    assert counted["episodes"] == 3000
    assert counted["reset_s_p50"] == pytest.approx(2499, abs=1)
    assert (counted["step_s_p50"], counted["step_s_p95"]) == (2.0, 100.0)
    assert counted["actions_per_minute"] == 4.0
