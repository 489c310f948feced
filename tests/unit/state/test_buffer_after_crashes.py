"""What the buffer does for those who come back after a crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import Shortfall
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS, GroupFunctions, GroupPolicy, Member
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.support import poll, polled_delivery, start_external, start_played, uids, write, written


def test_a_job_is_not_exhausted_while_somebody_else_may_lose_his_lease(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, ids=("a", "b"))
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in ("a", "b") for i in (0, 1)))
    first = polled_delivery(buffer, job, lease_s=10, max_groups=1)
    last = polled_delivery(buffer, job, lease_s=10)
    assert last.meta_info["exhausted"] is False
    assert buffer.empty_meta_info(job)["exhausted"] is False
    buffer.acknowledge([last.delivery_id])
    clock.advance(11)
    again = polled_delivery(buffer, job, lease_s=10)
    assert uids(buffer, again) == uids(buffer, first)
    buffer.acknowledge([again.delivery_id])
    assert buffer.empty_meta_info(job)["exhausted"] is True


def test_what_a_resumed_trainer_consumed_does_not_come_again_though_its_lease_ran_out(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer, ids=("a", "b"))
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in ("a", "b") for i in (0, 1)))
    lost_ack = poll(buffer, job, lease_s=10)
    clock.advance(11)
    buffer.expire_leases()

    start_external(buffer, ids=("a", "b"), skip_instance_ids=["a"])
    again = poll(buffer, job, lease_s=10)

    assert lost_ack is not None
    assert again is not None
    assert uids(buffer, again) == ["b0", "b1"]
    answers = buffer.acknowledge([lost_ack.delivery_id, again.delivery_id])
    assert (answers["expired"], answers["acked"]) == ([lost_ack.delivery_id], [again.delivery_id])
    assert poll(buffer, job, lease_s=10) is None


def test_groups_that_gave_nothing_are_reported_once_after_a_resumption(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, ids=("a", "b", "dull"))
    write(buffer, job, *(written(f"dull{i}", "dull", reward=1) for i in (0, 1)))
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in ("a", "b") for i in (0, 1)))
    poll(buffer, job, lease_s=10)
    clock.advance(11)
    buffer.expire_leases()

    start_external(buffer, ids=("a", "b", "dull"), skip_instance_ids=[])
    first, second = (poll(buffer, job, lease_s=10, max_groups=1) for _ in range(2))

    assert first is not None
    assert second is not None
    assert [*first.meta_info["finished_groups"], *second.meta_info["finished_groups"]] == ["dull", "a", "b"]


def test_the_last_delivery_says_that_nothing_comes_after_it(buffer: Buffer) -> None:
    job = start_external(buffer, ids=("a",))
    write(buffer, job, written("a0", "a", reward=0), written("a1", "a"))
    assert polled_delivery(buffer, job, lease_s=10).meta_info["exhausted"] is True


def test_an_attempt_of_a_closed_group_does_not_run_for_ever(buffer: Buffer) -> None:
    job = start_played(buffer)
    fence = buffer.begin_running(job.key)
    group = buffer.open_groups(job.key, after=(-1, -1), limit=1)[0]
    assert buffer.begin_attempt(fence, group, 0) == 1
    buffer.judge_and_close(group, group_policy(job), shortfall=Shortfall.TIMED_OUT, fence=fence)
    # The runner is killed before it gives the attempt up.
    buffer.begin_running(job.key)
    assert describe_job(buffer.store, job)["attempts"] == {"given_up": 1}


def test_a_replaced_runner_does_not_fail_the_job_of_its_successor(buffer: Buffer) -> None:
    job = start_played(buffer)
    replaced = buffer.begin_running(job.key)
    buffer.begin_running(job.key)
    with pytest.raises(StaleAttemptError):
        buffer.stop_failing_job(replaced, job.key, limit=3)
    assert describe_job(buffer.store, job)["state"] == "running"


def while_judging(happens: Callable[[], object]) -> GroupFunctions:
    """Functions of a generator, during whose first call something happens."""
    left = [happens]

    def filter_item(member: Member, policy: GroupPolicy) -> bool:
        if left:
            left.pop()()
        return True

    return replace(DEFAULT_FUNCTIONS, filter_item=filter_item)


def test_a_member_that_came_after_the_judging_is_not_left_out(buffer: Buffer) -> None:
    job = start_external(buffer, n=4, ids=("a",))
    write(buffer, job, *(written(f"a{i}", "a", reward=i % 2) for i in range(3)))
    ((group, _),) = buffer.open_groups_with_items(job.key)
    functions = while_judging(lambda: write(buffer, job, written("a3", "a")))  # and with it the group is complete
    assert buffer.judge_and_close(group, group_policy(job), functions, shortfall=Shortfall.TIMED_OUT) is None
    assert len(uids(buffer, poll(buffer, job))) == 4


def test_a_verdict_that_knows_too_few_members_is_no_verdict(buffer: Buffer) -> None:
    job = start_external(buffer, n=4, ids=("a",))
    write(buffer, job, *(written(f"a{i}", "a", reward=i % 2) for i in range(2)))
    ((group, _),) = buffer.open_groups_with_items(job.key)
    functions = while_judging(lambda: write(buffer, job, written("a2", "a")))
    policy = replace(group_policy(job), min_timeout_group_size_ratio=0.5)
    verdict = buffer.judge_and_close(group, policy, functions, shortfall=Shortfall.TIMED_OUT)
    assert verdict is not None
    assert [member.uid for member in verdict.members if not member.remove_sample] == ["a0", "a1", "a2"]
    assert buffer.judge_and_close(group, policy) is None


def test_a_damaged_member_is_left_out_of_the_judging_and_ends_no_runner(buffer: Buffer) -> None:
    job = start_external(buffer, n=4, ids=("a",))
    write(buffer, job, *(written(f"a{i}", "a", reward=i) for i in range(3)))
    with buffer.store.write() as connection:
        connection.execute("UPDATE trajectories SET body = X'00' WHERE uid = 'a1'")
    ((group, _),) = buffer.open_groups_with_items(job.key)
    policy = replace(group_policy(job), min_timeout_group_size_ratio=0.5)
    functions = replace(DEFAULT_FUNCTIONS, needs_items=True)
    verdict = buffer.judge_and_close(group, policy, functions, shortfall=Shortfall.TIMED_OUT)
    assert verdict is not None
    assert [member.uid for member in verdict.members if not member.remove_sample] == ["a0", "a2"]
    assert describe_job(buffer.store, job)["damaged"] == 1


def test_groups_do_not_time_out_by_the_time_that_no_server_ran(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, ids=("a",), group_timeout_seconds=60)
    write(buffer, job, written("a0", "a"))
    clock.advance(3600)
    buffer.restart_group_clocks()
    assert buffer.close_timed_out_groups() == 0
    clock.advance(61)
    assert buffer.close_timed_out_groups() == 1


def test_groups_do_not_time_out_by_the_time_their_job_was_paused(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, ids=("a",), group_timeout_seconds=60)
    write(buffer, job, written("a0", "a"))
    buffer.change_job(job.job_id, "pause")
    clock.advance(3600)
    buffer.change_job(job.job_id, "resume")
    assert buffer.close_timed_out_groups() == 0


def test_a_clock_that_is_set_back_does_not_lengthen_a_lease(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, ids=("a",))
    write(buffer, job, written("a0", "a", reward=0), written("a1", "a"))
    first = poll(buffer, job, lease_s=10)
    clock.advance(-3600)
    buffer.expire_leases()
    assert poll(buffer, job, lease_s=10) is None
    clock.advance(11)
    again = poll(buffer, job, lease_s=10)
    assert first is not None
    assert again is not None
    assert uids(buffer, again) == uids(buffer, first)


def test_a_heartbeat_from_the_future_is_as_old_as_it_is_ahead(buffer: Buffer, clock: SettableClock) -> None:
    buffer.beat("supervisor", 1, {})
    clock.advance(-3600)
    assert buffer.heartbeat("supervisor") == (3600, {})


def test_a_finished_job_runs_again_when_the_trainer_goes_back_behind_its_skip_list(buffer: Buffer) -> None:
    job = start_played(buffer, ("a", "b"), job_id="j", skip_instance_ids=["a", "b"])
    assert buffer.finish_if_done(job.key)
    assert start_played(buffer, ("a", "b"), job_id="j", skip_instance_ids=["b"]).state.value == "running"
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    assert group.instance_id == "a"


def test_what_was_cancelled_is_not_started_by_a_skip_list(buffer: Buffer) -> None:
    job = start_played(buffer, ("a",), job_id="j")
    buffer.change_job(job.job_id, "cancel")
    start_played(buffer, ("a",), job_id="j", skip_instance_ids=[])
    assert describe_job(buffer.store, job)["groups"]["skipped"] == 1
