"""How a job keeps to its lag: what is handed out, in which order, and what the trainer waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting.diagnosis import explain_job
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.reporting.job_snapshot import take_snapshot
from slime_plugins.rollout_buffer.rules.causes import STALE
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Generation
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from tests.support import delivered_items, poll, slot_counts, start_played, trajectory


class Played:
    """A job of groups of two, played by hand; a version is two groups."""

    def __init__(self, buffer: Buffer, clock: SettableClock, **changes: object) -> None:
        ids = [f"i{number}" for number in range(40)]
        self.buffer, self.clock = buffer, clock
        self.key = start_played(buffer, ids, **{"max_weight_version_lag": 2, **changes}).key
        self.fence = buffer.begin_running(self.key)
        self.groups = iter(buffer.open_groups(self.key, after=(-1, -1), limit=40))

    @property
    def job(self) -> JobRecord:
        return self.buffer.job_by_key(self.key)

    def begin(self) -> GroupRecord:
        group = next(self.groups)
        for slot in (0, 1):
            assert self.buffer.begin_attempt(self.fence, group, slot) == 1
        return group

    def end(self, group: GroupRecord, version: int) -> None:
        for slot in (0, 1):
            turn = Generation([1], [2], [-0.5], weight_version=str(version))
            brought = trajectory(group.attempt_uid(slot, 1), group.instance_id, slot, generations=[turn])
            self.buffer.add_trajectory(self.fence, group, slot, 1, brought)
        self.buffer.judge_and_close(group, group_policy(self.job))

    def poll(self, version: int) -> list[str]:
        delivery = poll(self.buffer, self.job, weight_version=version, max_groups=2)
        if delivery is None:
            self.buffer.note_empty_poll(self.job)
            return []
        return list(dict.fromkeys(item["instance_id"] for item, _ in delivered_items(self.buffer, delivery)))

    def train(self, version: int) -> None:
        """One version: two groups, of which each takes the trainer 50 s."""
        for group in (self.begin(), self.begin()):
            self.end(group, version)
        if not (taken := self.poll(version)):  # it waits for a slower group, as long as that is worth it
            self.clock.advance(500)
            taken = self.poll(version)
        assert len(taken) == 2
        self.clock.advance(100)


@pytest.fixture
def played(buffer: Buffer, clock: SettableClock) -> Played:
    return Played(buffer, clock)


def test_a_job_whose_groups_wait_for_newer_weights_says_so(played: Played) -> None:
    for version in (1, 2):
        played.train(version)
    for group in [played.begin() for _ in range(4)]:
        played.end(group, 2)
    played.clock.advance(1000)
    job = played.job
    with played.buffer.store.read() as connection:
        groups = {"open": 30, "ready": 4}
        snapshot = take_snapshot(connection, job, groups, played.clock(), played.buffer.store.data_dir)
        written = replace(job, takes_items=True, settings=replace(job.settings, staleness_policy="admit"))
        assert not take_snapshot(connection, written, {}, played.clock(), played.buffer.store.data_dir).lag_reached
    assert [one.code for one in explain_job(replace(snapshot, supervisor_age_s=1.0))] == ["backpressure"]


def test_by_default_nothing_is_dropped_and_what_is_late_is_named(played: Played) -> None:
    group = played.begin()
    for version in (1, 2, 3, 4):
        played.train(version)
    played.clock.advance(1000)
    played.end(group, 1)
    delivery = poll(played.buffer, played.job, weight_version=5)
    assert delivery is not None
    assert delivery.meta_info["stale_groups"] == [group.key]
    assert slot_counts(played.buffer, played.job)["filtered"] == 0


def test_dropping_is_asked_for_by_name(buffer: Buffer, clock: SettableClock) -> None:
    played = Played(buffer, clock, staleness_policy="drop")
    group = played.begin()
    for version in (1, 2, 3, 4):
        played.train(version)
    played.end(group, 1)
    assert played.poll(5) == []
    assert list(describe_job(buffer.store, played.job)["causes"]["filtered"]) == [STALE.message]


def test_the_policy_may_change_from_one_start_to_the_next() -> None:
    names = {parse(StartPayload, {"task_type": "external", **more}).identity
             for more in ({}, {"staleness_policy": "admit"}, {"staleness_policy": "drop"})}  # fmt: skip
    assert len(names) == 1


def test_the_group_that_began_first_goes_out_first(played: Played) -> None:
    slow = played.begin()
    played.clock.advance(1)
    quick = played.begin()
    played.clock.advance(1)
    last = played.begin()
    for group in (last, quick, slow):
        played.end(group, 1)
    assert played.poll(1) == [slow.instance_id, quick.instance_id]


def test_the_trainer_waits_for_a_group_that_its_next_step_would_make_too_old(played: Played) -> None:
    played.train(1)
    slow = played.begin()
    played.clock.advance(1)
    played.train(2)
    assert not played.buffer.would_deliver(played.job, PollPayload())
    played.end(played.begin(), 3)
    assert played.poll(3) == [], "with the ready groups the slow one would be 2 versions behind"
    assert not played.buffer.would_deliver(played.job, PollPayload())
    played.end(slow, 1)
    assert played.buffer.would_deliver(played.job, PollPayload())
    assert played.poll(3)[0] == slow.instance_id


@pytest.mark.parametrize(
    "change",
    [
        lambda played: played.clock.advance(250),
        lambda played: played.buffer.change_job(played.job.job_id, "pause"),
        lambda played: played.buffer.change_job(played.job.job_id, "cancel"),
    ],
    ids=["later", "paused", "cancelled"],
)
def test_the_trainer_waits_neither_for_ever_nor_for_a_job_that_does_not_run(
    played: Played, change: Callable[[Played], object]
) -> None:
    played.train(1)
    played.begin()
    played.clock.advance(1)
    played.train(2)
    ready = played.begin()
    played.end(ready, 3)
    assert played.poll(3) == []
    change(played)
    assert played.buffer.would_deliver(played.buffer.job(played.job.job_id), PollPayload())
    assert played.poll(3) == [ready.instance_id]
