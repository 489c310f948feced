"""The rules of the buffer, without HTTP and without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConflictError, NotFoundError, StaleAttemptError
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.tables import job_rows
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Image
from tests.support import (
    PNG,
    begun_attempt,
    delivered_items,
    poll,
    polled_delivery,
    slot_counts,
    start_external,
    start_played,
    trajectory,
    uids,
    write,
    written,
)

# --- writing and delivering ------------------------------------------------------------------------------------------


def test_a_group_is_delivered_when_its_last_member_came(buffer: Buffer) -> None:
    job = start_external(buffer)
    assert write(buffer, job, written("u1", reward=0)) == ["stored"]
    assert poll(buffer, job) is None
    write(buffer, job, written("u2"))
    assert uids(buffer, poll(buffer, job)) == ["u1", "u2"]
    assert slot_counts(buffer, job)["delivered"] == 2


def test_without_a_job_id_the_only_open_job_is_meant_and_of_several_none(buffer: Buffer) -> None:
    with pytest.raises(NotFoundError, match="no job is open"):
        write(buffer, None, written("u"))
    job = start_external(buffer, job_id="one")
    assert write(buffer, None, written("u")) == ["stored"]
    start_external(buffer, job_id="two")
    with pytest.raises(ConflictError, match="2 jobs are open: select one with job_id"):
        write(buffer, None, written("v"))
    with pytest.raises(ConflictError, match="2 jobs are open or have undelivered groups: select one"):
        buffer.resolve_job(None)
    assert buffer.resolve_job("one")[0] is not None
    assert job.job_id == "one"


def test_max_groups_and_batch_size_hand_out_whole_groups(buffer: Buffer) -> None:
    job = start_external(buffer)
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in "abc" for i in (0, 1)))
    assert uids(buffer, poll(buffer, job, max_groups=1)) == ["a0", "a1"]
    assert uids(buffer, poll(buffer, job, batch_size=3)) == ["b0", "b1"]
    rounded_up = polled_delivery(buffer, job, batch_size=1)
    assert uids(buffer, rounded_up) == ["c0", "c1"]
    assert rounded_up.meta_info["note"].startswith("batch_size 1 was rounded up to one group of 2 samples")


def test_meta_info_counts_each_write_once_and_names_every_group_that_ended(buffer: Buffer) -> None:
    job = start_external(buffer)
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in "ab" for i in (0, 1)))
    write(buffer, job, written("c0", "c", reward=1), written("c1", "c", reward=1))
    first = polled_delivery(buffer, job, max_groups=1)
    assert first.meta_info["total_samples"] == 6
    assert first.meta_info["avg_reward"] == pytest.approx(4 / 6)
    assert sorted(first.meta_info["finished_groups"]) == ["a", "c"]
    second = polled_delivery(buffer, job, max_groups=1)
    assert second.meta_info["total_samples"] == 0
    assert second.meta_info["finished_groups"] == ["b"]


def test_a_generators_meta_info_of_one_group_replaces_no_sum_of_the_delivery(buffer: Buffer) -> None:
    job = start_external(buffer)
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in "ab" for i in (0, 1)))
    with buffer.store.write() as connection:
        job_rows.update_job(connection, job.key, meta_info='{"total_samples": 2, "mine": 5}')
    delivery = polled_delivery(buffer, job)
    assert (delivery.meta_info["total_samples"], delivery.meta_info["mine"]) == (4, 5)  # type: ignore[typeddict-item]  # any key


# --- leases ----------------------------------------------------------------------------------------------------------


def ready_job(buffer: Buffer) -> JobRecord:
    job = start_external(buffer)
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in "ab" for i in (0, 1)))
    return job


def test_an_acknowledged_delivery_never_comes_back_and_acks_are_idempotent(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = ready_job(buffer)
    delivery = polled_delivery(buffer, job, lease_s=10)
    assert buffer.acknowledge([delivery.delivery_id])["acked"] == [delivery.delivery_id]
    clock.advance(100)
    assert buffer.acknowledge([delivery.delivery_id])["acked"] == [delivery.delivery_id]
    assert poll(buffer, job, lease_s=10) is None
    assert slot_counts(buffer, job)["delivered"] == 4


def test_a_late_ack_of_groups_that_still_wait_is_taken(buffer: Buffer, clock: SettableClock) -> None:
    job = ready_job(buffer)
    first = polled_delivery(buffer, job, lease_s=10)
    clock.advance(11)
    assert buffer.acknowledge([first.delivery_id])["acked"] == [first.delivery_id]
    assert poll(buffer, job, lease_s=10) is None


def leased_to(buffer: Buffer, job: JobRecord, who: str, number: int = 1, **options: object) -> Delivery:
    return polled_delivery(buffer, job, **{"lease_s": 10, "consumer_id": who, "poll_id": str(number), **options})


def test_what_neither_of_two_acknowledged_comes_back_to_a_third(buffer: Buffer, clock: SettableClock) -> None:
    job = ready_job(buffer)
    first = leased_to(buffer, job, "a")
    clock.advance(11)
    second = leased_to(buffer, job, "b")
    clock.advance(11)
    assert buffer.acknowledge([first.delivery_id])["expired"] == [first.delivery_id]
    third = leased_to(buffer, job, "c")
    assert uids(buffer, third) == uids(buffer, first)
    assert buffer.acknowledge([second.delivery_id])["expired"] == [second.delivery_id]
    assert buffer.acknowledge([third.delivery_id])["acked"] == [third.delivery_id]


def test_a_repeated_poll_keeps_its_delivery_while_nobody_else_got_it(buffer: Buffer, clock: SettableClock) -> None:
    job = ready_job(buffer)
    first = leased_to(buffer, job, "a")
    clock.advance(11)
    assert leased_to(buffer, job, "a") == first
    clock.advance(11)
    other = leased_to(buffer, job, "b")
    assert poll(buffer, job, lease_s=10, consumer_id="a", poll_id="1") is None
    assert leased_to(buffer, job, "b") == other


def test_a_group_that_went_stale_while_it_waited_again_is_reported(buffer: Buffer, clock: SettableClock) -> None:
    """Its delivery will not come back whole, so what the delivery had reported is reported again."""
    job = start_external(buffer, max_weight_version_lag=0)
    for name, version in (("a", 1), ("b", 2)):
        generations = [{"prompt_ids": [1], "output_ids": [2], "finish_reason": "stop", "weight_version": version}]
        write(buffer, job, *(written(f"{name}{i}", name, reward=i, generations=generations) for i in (0, 1)))
        if name == "a":
            leased_to(buffer, job, "a")
            clock.advance(11)
    after = leased_to(buffer, job, "b")
    assert after.meta_info["finished_groups"] == ["a", "b"]
    assert after.meta_info["total_samples"] == 4


# --- starting again --------------------------------------------------------------------------------------------------


def test_the_same_payload_attaches_and_takes_over_the_new_engine(buffer: Buffer) -> None:
    job = start_played(buffer)
    again = start_played(buffer, remote_engine_url="http://engine:2")
    assert again.key == job.key
    assert again.engine_url == "http://engine:2"
    assert start_played(buffer, ids=("c",)).key != job.key


def test_concurrency_and_tokenizer_path_may_change_when_a_trainer_attaches(buffer: Buffer) -> None:
    job = start_played(buffer, job_id="j", num_process=4)
    again = start_played(buffer, job_id="j", num_process=64, tokenizer_path="/moved")
    assert again.key == job.key
    assert (again.settings.all_values["num_process"], again.settings.tokenizer_path) == (64, "/moved")


def test_another_payload_under_the_same_id_is_refused_with_what_differs(buffer: Buffer) -> None:
    start_played(buffer, job_id="j")
    with pytest.raises(ConflictError, match="num_epoch"):
        start_played(buffer, job_id="j", num_epoch=7)


def test_a_fresh_start_finds_a_free_name_for_the_old_job_also_beside_one_that_is_called_so(buffer: Buffer) -> None:
    old = start_external(buffer, job_id="j")
    taken = start_external(buffer, job_id=f"j~{old.key}")
    start_external(buffer, job_id="j", fresh=True)
    assert buffer.job(f"j~{old.key}").key == taken.key
    assert buffer.job(f"j~{old.key}~").key == old.key


def test_the_name_of_a_superseded_job_is_one_that_can_be_asked_for(buffer: Buffer) -> None:
    longest = "j" * 256
    old = start_external(buffer, job_id=longest)
    start_external(buffer, job_id=longest, fresh=True)
    name = buffer.job_by_key(old.key).job_id
    assert (len(name), name[-4:]) == (256, f"jj~{old.key}")


# --- runners ---------------------------------------------------------------------------------------------------------


def test_a_result_of_an_attempt_that_was_given_up_is_refused(buffer: Buffer) -> None:
    job = start_played(buffer)
    old = buffer.begin_running(job.key)
    group = buffer.open_groups(job.key, after=(-1, -1), limit=1)[0]
    attempt = begun_attempt(buffer, old, group, 0)
    new, brought = buffer.begin_running(job.key), trajectory("t", images=[Image(data=PNG)])
    with pytest.raises(StaleAttemptError, match="was replaced by runner 2"):
        buffer.add_trajectory(old, group, 0, attempt, brought)
    with pytest.raises(StaleAttemptError, match="was given up"):
        buffer.add_trajectory(new, group, 0, attempt, brought)
    assert buffer.begin_attempt(new, group, 0) == 2
    assert not list(buffer.store.packs_dir.iterdir()), "what is refused takes no place on the disk"


def test_a_result_that_came_while_its_group_was_skipped_fills_no_slot_when_it_is_wanted_again(buffer: Buffer) -> None:
    job = start_played(buffer, job_id="j")
    fence = buffer.begin_running(job.key)
    group = buffer.open_groups(job.key, after=(-1, -1), limit=1)[0]
    attempt = begun_attempt(buffer, fence, group, 0)
    start_played(buffer, job_id="j", skip_instance_ids=[group.instance_id])
    assert buffer.add_trajectory(fence, group, 0, attempt, trajectory("t")).status == "late"
    start_played(buffer, job_id="j", skip_instance_ids=[])
    assert buffer.open_groups(job.key, after=(-1, -1), limit=1)[0].key == group.key
    assert buffer.slot_progress(group.key) == {0: (False, 0)}, "it would never be played again, nor be whole"
    assert buffer.begin_attempt(fence, group, 0) == 2


# --- the clock -------------------------------------------------------------------------------------------------------


def test_a_group_that_waits_too_long_is_closed_by_the_clock(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, n=4, group_timeout_seconds=30, min_timeout_group_size_ratio=0.5)
    write(buffer, job, written("a0", "a", reward=0), written("a1", "a"), written("b0", "b"))
    clock.advance(29)
    assert buffer.close_timed_out_groups() == 0
    clock.advance(2)
    assert buffer.close_timed_out_groups() == 2
    accounting = slot_counts(buffer, job)
    assert (accounting["ready"], accounting["failed"]) == (4, 4)
    delivered = uids(buffer, poll(buffer, job))
    assert delivered[:2] == ["a0", "a1"]
    assert all("dummy" in uid for uid in delivered[2:])
    assert write(buffer, job, written("b1", "b")) == ["late"]


# --- staleness and idleness ------------------------------------------------------------------------------------------


def sampled_by(version: str) -> dict[str, Any]:
    return {"generations": [{"prompt_ids": [1], "output_ids": [2], "weight_version": version}]}


def test_stale_groups_may_be_delivered_with_a_flag(buffer: Buffer) -> None:
    job = start_external(buffer, max_weight_version_lag=0, staleness_policy="flag")
    write(buffer, job, written("a0", "a", reward=0, **sampled_by("default")), written("a1", "a", **sampled_by("1")))
    delivery = polled_delivery(buffer, job)
    (first, _) = delivered_items(buffer, delivery)
    assert first[0]["weight_version"] == 0
    assert delivery.meta_info["stale_groups"] == [first[0]["group_index"]]


def idle_job(buffer: Buffer, advance: Callable[[float], None], **settings: Any) -> JobRecord:
    """A job with one ready group and one begun one that nobody has polled for longer than it waits."""
    job = start_played(buffer, ("a", "b"), pause_when_idle_s=60, **settings)
    fence = buffer.begin_running(job.key)
    first, second = buffer.open_groups(job.key, after=(-1, -1), limit=2)
    for group, slot in ((first, 0), (first, 1), (second, 0)):
        attempt = begun_attempt(buffer, fence, group, slot)
        item = trajectory(f"{group.instance_id}{slot}", group.instance_id, reward=slot)
        buffer.add_trajectory(fence, group, slot, attempt, item)
    advance(61)
    assert buffer.pause_idle_jobs() == []  # nothing is ready yet: nobody has reason to poll
    buffer.judge_and_close(first, group_policy(job))
    return job


def test_a_job_nobody_polls_pauses_itself_and_the_next_poll_resumes_it(buffer: Buffer, clock: SettableClock) -> None:
    job = idle_job(buffer, clock.advance)
    assert buffer.pause_idle_jobs() == [job.job_id]
    paused = buffer.job(job.job_id)
    assert (paused.state.value, paused.updated_at) == ("paused", clock())
    clock.advance(1000)
    buffer.note_poll(job)
    resumed = buffer.job(job.job_id)  # its runner has START_TIMEOUT_S from here on
    assert (resumed.state.value, resumed.updated_at) == ("running", clock())


def test_a_job_that_ended_while_it_was_found_idle_stays_as_it_ended(
    buffer: Buffer, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = idle_job(buffer, clock.advance)
    seen = buffer.unfinished_jobs()
    buffer.change_job(job.job_id, "cancel")
    monkeypatch.setattr(buffer, "unfinished_jobs", lambda: seen)
    assert buffer.pause_idle_jobs() == []
    assert buffer.job(job.job_id).state.value == "cancelled"


def test_groups_of_a_job_that_a_poll_resumes_get_their_whole_timeout(buffer: Buffer, clock: SettableClock) -> None:
    job = idle_job(buffer, clock.advance, group_timeout_seconds=100)
    buffer.pause_idle_jobs()
    clock.advance(200)
    buffer.note_poll(job)
    clock.advance(99)
    assert buffer.timed_out_groups(buffer.job(job.job_id)) == []
    clock.advance(2)
    assert [group.instance_id for group in buffer.timed_out_groups(buffer.job(job.job_id))] == ["b"]
