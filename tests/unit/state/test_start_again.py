"""A job that is started more than once: what a repeated start changes, and whose items are that were there before."""

from __future__ import annotations

from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import start_id_rows
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from tests.support import poll, polled_delivery, slot_counts, start_external, uids, write, written

TRAINER: dict[str, Any] = {
    "job_id": "j",
    "fresh": True,
    "skip_instance_ids": [],
    "sampling_params": {"temperature": 0.7},
    "remote_engine_url": "http://trainer:1",
}
"""What a trainer's first rollout asks of a job that somebody else has made with a shorter payload."""


def write_groups(buffer: Buffer, job: JobRecord, *names: str) -> None:
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in names for i in (0, 1)))


def reopened(buffer: Buffer) -> Buffer:
    buffer.store.close()
    return Buffer(Store(buffer.store.data_dir), clock=buffer.clock)


# --- the same start again --------------------------------------------------------------------------------------------


def test_a_start_that_comes_again_after_later_ones_gives_out_nothing_that_was_acknowledged(buffer: Buffer) -> None:
    first: dict[str, Any] = {"job_id": "j", "skip_instance_ids": [], "start_id": "s1"}
    job = start_external(buffer, remote_engine_url="http://old:1", **first)
    start_external(buffer, remote_engine_url="http://new:1", **{**first, "start_id": "s2"})
    write_groups(buffer, job, "a", "b", "c")
    delivery = polled_delivery(buffer, job, lease_s=60)
    buffer.acknowledge([delivery.delivery_id])
    buffer = reopened(buffer)
    again = start_external(buffer, remote_engine_url="http://old:1", **first)
    assert (again.key, again.engine_url, again.trainer_run) == (job.key, "http://new:1", 2)
    assert poll(buffer, again) is None
    assert slot_counts(buffer, again)["delivered"] == 6
    buffer.store.close()


def test_a_start_that_comes_again_after_its_job_was_begun_anew_leaves_the_new_job_alone(buffer: Buffer) -> None:
    first = start_external(buffer, job_id="j", fresh=True, start_id="s1")
    second = start_external(buffer, job_id="j", fresh=True, start_id="s2")
    with pytest.raises(ConflictError, match=rf"job j was started again since: .* is now j~{first.key}"):
        start_external(buffer, job_id="j", fresh=True, start_id="s1")
    assert [(job.key, job.state) for job in buffer.jobs()] == [(second.key, "running"), (first.key, "cancelled")]


def test_a_start_without_a_name_that_comes_again_after_its_job_ended_makes_no_other_job(buffer: Buffer) -> None:
    job = start_external(buffer, ids=("a",), start_id="s")
    write_groups(buffer, job, "a")
    assert buffer.finish_if_done(job.key)
    assert start_external(buffer, ids=("a",), start_id="s").key == job.key
    assert start_external(buffer, ids=("a",), start_id="t").key != job.key


def test_a_start_id_is_one_start_of_one_payload(buffer: Buffer) -> None:
    first = start_external(buffer, job_id="j", start_id="s")
    assert start_external(buffer, job_id="other", start_id="s").key != first.key
    with pytest.raises(ConflictError, match="num_epoch"):
        start_external(buffer, job_id="j", start_id="s", num_epoch=2)


def test_of_each_job_the_newest_start_ids_are_kept(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_id_rows, "MAX_START_IDS", 3)
    for at in range(5):
        start_external(buffer, job_id="j", start_id=f"s{at}")
        start_external(buffer, job_id="other", start_id=f"s{at % 2}")
    with buffer.store.read() as connection:
        rows = connection.execute("SELECT job_id, start_id FROM start_ids ORDER BY key").fetchall()
    kept = {name: [row["start_id"] for row in rows if row["job_id"] == name] for name in ("j", "other")}
    assert kept == {"j": ["s2", "s3", "s4"], "other": ["s0", "s1"]}


def test_a_start_says_whether_it_attached_and_whether_the_job_had_failed(buffer: Buffer) -> None:
    payload = parse(StartPayload, {"job_id": "j", "task_type": "external", "num_repeat_per_sample": 2})
    started = [buffer.start_job(payload, ()) for _ in range(2)]
    buffer.fail_job(started[0].job.key, "no tokenizer")
    started += [buffer.start_job(payload, ()) for _ in range(2)]
    assert [(one.attached, one.reopened) for one in started] == [
        (False, False),
        (True, False),
        (True, True),
        (True, False),
    ]


# --- a trainer comes to a job that was filled before -----------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_what_was_written_before_any_trainer_came_is_the_first_trainers(buffer: Buffer, fresh: bool) -> None:
    made = start_external(buffer, job_id="j", reward_range=[0, 1])
    write_groups(buffer, made, "a")
    write(buffer, made, written("b0", "b", reward=0))
    buffer = reopened(buffer)
    job = start_external(buffer, **{**TRAINER, "fresh": fresh, "start_id": "first rollout"})
    assert job.key == made.key
    assert (job.engine_url, job.settings.all_values["sampling_params"]["temperature"]) == ("http://trainer:1", 0.7)
    assert job.settings.all_values["reward_range"] == [0, 1], "the trainer does not say otherwise"
    assert uids(buffer, poll(buffer, job)) == ["a0", "a1"]
    assert write(buffer, job, written("b1", "b")) == ["stored"]
    assert uids(buffer, poll(buffer, job)) == ["b0", "b1"]
    assert start_external(buffer, **{**TRAINER, "fresh": fresh, "start_id": "first rollout"}).key == job.key
    buffer.store.close()


def test_a_job_that_was_filled_to_its_end_is_delivered(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j", ids=("a", "b"))
    write_groups(buffer, made, "a", "b")
    assert buffer.finish_if_done(made.key)
    job = start_external(buffer, **TRAINER)
    assert (job.key, job.state) == (made.key, "finished")
    assert uids(buffer, poll(buffer, job)) == ["a0", "a1", "b0", "b1"]


def test_groups_that_another_consumer_leased_are_delivered_to_the_first_trainer(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j")
    write_groups(buffer, made, "a")
    assert poll(buffer, made, lease_s=60) is not None
    assert uids(buffer, poll(buffer, start_external(buffer, **TRAINER))) == ["a0", "a1"]


def test_who_made_the_job_finds_it_as_its_trainer_has_it(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j")
    taken = start_external(buffer, **TRAINER)
    assert start_external(buffer, job_id="j") == taken
    assert taken.key == made.key
    with pytest.raises(ConflictError, match="other settings"):
        start_external(buffer, job_id="j", skip_instance_ids=[])


def test_items_that_a_trainer_cannot_take_are_not_set_aside_in_silence(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j", n=2)
    write_groups(buffer, made, "a")
    with pytest.raises(ConflictError, match=r"2 items that no trainer has consumed.* num_repeat_per_sample 2, .* 4:"):
        start_external(buffer, n=4, **TRAINER)
    buffer.change_job("j", "cancel")
    assert start_external(buffer, n=4, **TRAINER).key != made.key


def started_by_a_trainer(buffer: Buffer, job: JobRecord) -> None:
    start_external(buffer, job_id="j", skip_instance_ids=[])
    write_groups(buffer, job, "a")


def consumed_by_somebody(buffer: Buffer, job: JobRecord) -> None:
    write_groups(buffer, job, "a")
    assert poll(buffer, job, max_groups=1) is not None


def cancelled(buffer: Buffer, job: JobRecord) -> None:
    write_groups(buffer, job, "a")
    buffer.change_job("j", "cancel")


@pytest.mark.parametrize("before", [started_by_a_trainer, consumed_by_somebody, cancelled])
def test_a_job_that_had_its_trainer_is_begun_anew(buffer: Buffer, before: Any) -> None:
    made = start_external(buffer, job_id="j")
    before(buffer, made)
    job = start_external(buffer, **TRAINER)
    assert job.key != made.key
    assert poll(buffer, job) is None
    assert [one.job_id for one in buffer.jobs()] == ["j", f"j~{made.key}"]


def test_fresh_without_a_skip_list_is_nobodys_trainer_and_begins_anew(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j")
    write_groups(buffer, made, "a")
    again = start_external(buffer, job_id="j", fresh=True)
    assert again.key != made.key
    write_groups(buffer, again, "b")
    assert uids(buffer, poll(buffer, start_external(buffer, **TRAINER))) == ["b0", "b1"]
