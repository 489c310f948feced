"""Groups of an input get rows when they are needed; until then they are numbers of a plan, and count as open."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import BusyError, ConflictError, NotFoundError, StorageFullError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.state import group_opening
from slime_plugins.rollout_buffer.state.input_files import instances_from_lines
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, input_rows
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState, JobState
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from tests.example_counts import examples
from tests.support import Claims, poll, polled_delivery, refuse_room, slot_counts, start_external, uids, write, written

NAMES = ("a", "b", "c", "d", "e")
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of five lines has more than one chunk and more than one bucket."""
    monkeypatch.setattr(input_rows, "CHUNK_BYTES", 60)
    monkeypatch.setattr(input_rows, "IDS_PER_BUCKET", 2)


@contextmanager
def buffer_in_memory() -> Iterator[Buffer]:
    """A new buffer for each example of a property, in memory where the machine has such a folder."""
    with tempfile.TemporaryDirectory(prefix="rollout-buffer-", dir=IN_MEMORY) as folder:
        buffer = Buffer(Store(Path(folder)))
        yield buffer
        buffer.store.close()


def groups(buffer: Buffer, job: JobRecord) -> list[GroupRecord]:
    """The groups that have rows, in playing order."""
    with buffer.store.read() as connection:
        rows = connection.execute("SELECT * FROM groups WHERE job_key = ? ORDER BY epoch, position", (job.key,))
        return [group_rows.as_group(row) for row in rows]


def named(found: list[GroupRecord]) -> list[tuple[int, str]]:
    return [(group.epoch, group.instance_id) for group in found]


def write_group(buffer: Buffer, job: JobRecord, name: str, *, tag: str = "") -> None:
    write(buffer, job, *(written(f"{name}{tag}{at}", name, reward=at) for at in (0, 1)))


# --- which groups there are ------------------------------------------------------------------------------------------


def test_a_job_of_two_million_groups_starts_without_a_row(buffer: Buffer) -> None:
    job = start_external(buffer, n=1, ids=("a", "b"), num_epoch=1_000_000)
    assert groups(buffer, job) == []
    assert slot_counts(buffer, job)["open"] == 2_000_000
    assert not buffer.finish_if_done(job.key)


def test_a_runner_is_given_the_groups_epoch_by_epoch_in_the_order_of_the_input(buffer: Buffer) -> None:
    job = start_external(buffer, ids=NAMES, num_epoch=2)
    played: list[GroupRecord] = []
    after = (-1, -1)
    while found := buffer.open_groups(job.key, after=after, limit=3):
        played += found
        after = (found[-1].epoch, found[-1].position)
        assert len(groups(buffer, job)) <= len(played) + 3
    assert named(played) == [(epoch, name) for epoch in (0, 1) for name in NAMES]
    assert slot_counts(buffer, job)["open"] == 2 * 10


def test_a_written_item_opens_the_next_epoch_of_its_instance(buffer: Buffer) -> None:
    job = start_external(buffer, ids=NAMES, num_epoch=2)
    for tag in ("first", "second", "third"):
        write_group(buffer, job, "d", tag=tag)
    assert named(groups(buffer, job)) == [(0, "d"), (1, "d")]
    assert slot_counts(buffer, job).items() >= {"ready": 4, "open": 16}.items()
    assert describe_job(buffer.store, job)["late"] == 2
    with pytest.raises(ConflictError, match="has no instance 'x'"):
        write(buffer, job, written("u", "x"))


def test_a_claim_opens_the_next_group_or_the_next_epoch_of_the_instance_that_it_names(buffer: Buffer) -> None:
    job, claims = start_external(buffer, n=1, ids=NAMES, num_epoch=2), Claims(buffer)
    claimed = [claims.take(job.job_id, name) for name in ("c", None, None, "c", None)]
    assert named([claim.group for claim in claimed]) == [(0, "c"), (0, "a"), (0, "b"), (1, "c"), (0, "d")]
    with pytest.raises(BusyError, match="every open slot of instance 'c'"):
        claims.take(job.job_id, "c")
    with pytest.raises(NotFoundError, match="has no instance 'x'"):
        claims.take(job.job_id, "x")


def test_an_instance_is_read_from_the_input(buffer: Buffer) -> None:
    job = start_external(buffer, ids=NAMES)
    found = buffer.open_groups(job.key, after=(-1, -1), limit=10)
    assert [buffer.instance(group).data for group in found] == [{"instance_id": name} for name in NAMES]


# --- skipping --------------------------------------------------------------------------------------------------------


@given(num_epoch=st.integers(1, 3), skip=st.lists(st.sampled_from([*NAMES, "unknown"]), max_size=12))
@examples(50)
def test_each_entry_of_a_skip_list_skips_one_epoch_of_its_instance_the_earliest_first(
    num_epoch: int, skip: list[str]
) -> None:
    with buffer_in_memory() as buffer:
        job = start_external(buffer, ids=NAMES, num_epoch=num_epoch, skip_instance_ids=skip)
        times = {name: min(skip.count(name), num_epoch) for name in NAMES}
        found = groups(buffer, job)
        assert {group.state for group in found} <= {GroupState.SKIPPED}
        assert sorted(named(found)) == sorted((epoch, name) for name in NAMES for epoch in range(times[name]))
        assert slot_counts(buffer, job)["open"] == 2 * (len(NAMES) * num_epoch - sum(times.values()))


def test_a_trainer_that_resumes_skips_groups_that_nobody_opened_and_may_go_back(buffer: Buffer) -> None:
    start: dict[str, Any] = {"job_id": "j", "ids": NAMES, "num_epoch": 2}
    job = start_external(buffer, skip_instance_ids=[], **start)
    write_group(buffer, job, "a")
    assert uids(buffer, poll(buffer, job, lease_s=60)) == ["a0", "a1"]
    start_external(buffer, skip_instance_ids=["a", "b", "b", "c"], **start)
    assert slot_counts(buffer, job).items() >= {"delivered": 2, "skipped": 6, "open": 12}.items()
    start_external(buffer, skip_instance_ids=["a", "b"], **start)
    assert slot_counts(buffer, job).items() >= {"delivered": 2, "skipped": 2, "open": 16}.items()
    assert named(buffer.open_groups(job.key, after=(-1, -1), limit=3)) == [(0, "c"), (0, "d"), (0, "e")]


def test_a_cancelled_job_has_skipped_what_was_never_opened(buffer: Buffer) -> None:
    job = start_external(buffer, ids=NAMES)
    write(buffer, job, written("a0", "a"))
    buffer.change_job(job.job_id, "cancel")
    assert slot_counts(buffer, job).items() >= {"skipped": 10, "open": 0}.items()
    assert write(buffer, job, written("b0", "b")) == ["late"]
    assert buffer.open_groups(job.key, after=(-1, -1), limit=3) == []
    assert len(groups(buffer, job)) == 1


def test_a_job_is_finished_when_its_last_planned_group_is_closed(buffer: Buffer) -> None:
    job = start_external(buffer, ids=("a", "b"), num_epoch=2)
    for tag in ("first", "second"):
        for name in ("a", "b"):
            assert not buffer.finish_if_done(job.key)
            write_group(buffer, job, name, tag=tag)
    assert buffer.finish_if_done(job.key)
    assert buffer.job(job.job_id).state is JobState.FINISHED
    delivery = polled_delivery(buffer, job)
    assert delivery.meta_info["exhausted"]


# --- a trainer's input comes to a job that was filled before ---------------------------------------------------------

TRAINER: dict[str, Any] = {"job_id": "j", "skip_instance_ids": []}


def test_the_input_of_the_first_trainer_is_added_to_what_was_written(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j")
    write_group(buffer, made, "b")
    write(buffer, made, written("z0", "z"))
    job = start_external(buffer, ids=("a", "b", "c"), num_epoch=2, **TRAINER)
    assert (job.key, job.instance_count) == (made.key, 4)
    assert slot_counts(buffer, job)["submitted"] == 2 * (6 + 1)
    found = buffer.open_groups(job.key, after=(-1, -1), limit=10)
    assert Counter(named(found)) == Counter([(0, "z"), (0, "a"), (0, "c"), (1, "a"), (1, "b"), (1, "c")])
    assert start_external(buffer, ids=("a", "b", "c"), num_epoch=2, **TRAINER).instance_count == 4
    assert slot_counts(buffer, job)["submitted"] == 2 * (6 + 1)


def test_the_line_of_an_instance_that_items_named_first_is_the_trainers(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j")
    write(buffer, made, written("b0", "b"), written("z0", "z"))
    (b, z) = groups(buffer, made)
    lines = [{"instance_id": "a"}, {"instance_id": "b", "prompt": "2 + 2?"}]
    body = {"task_type": "external", "num_repeat_per_sample": 2, "instances": lines, **TRAINER}
    buffer.start_job(parse(StartPayload, body), instances_from_lines(lines))
    assert buffer.instance(b).data == {"instance_id": "b", "prompt": "2 + 2?"}
    assert buffer.instance(z).data == {"instance_id": "z"}


def test_the_same_input_of_a_trainer_adds_the_epochs_that_it_lacked(buffer: Buffer) -> None:
    start_external(buffer, job_id="j", ids=NAMES)
    job = start_external(buffer, ids=NAMES, num_epoch=3, **TRAINER)
    assert (job.num_epoch, job.instance_count, groups(buffer, job)) == (3, 5, [])
    assert slot_counts(buffer, job)["open"] == 2 * 15


def test_another_input_of_a_trainer_comes_behind_the_first_one(buffer: Buffer) -> None:
    made = start_external(buffer, job_id="j", ids=("a", "b"))
    write_group(buffer, made, "a")
    job = start_external(buffer, ids=("b", "c"), num_epoch=2, **TRAINER)
    assert job.instance_count == 3
    assert slot_counts(buffer, job).items() >= {"submitted": 2 * 5, "ready": 2, "open": 8}.items()
    found = buffer.open_groups(job.key, after=(-1, -1), limit=10)
    assert named(found) == [(0, "b"), (0, "c"), (1, "b"), (1, "c")]
    assert [buffer.instance(group).instance_id for group in found] == ["b", "c", "b", "c"]


def test_attaching_to_a_job_needs_no_room(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    start_external(buffer, job_id="j", ids=NAMES)

    refuse_room(buffer, monkeypatch)
    assert start_external(buffer, job_id="j", ids=NAMES).job_id == "j"
    with pytest.raises(StorageFullError):
        start_external(buffer, job_id="other", ids=NAMES)


# --- accounting ------------------------------------------------------------------------------------------------------

Step = tuple[str, str]
STEPS = st.lists(
    st.tuples(st.sampled_from(["next", "write", "claim", "resume", "go back"]), st.sampled_from(NAMES)), max_size=25
)


@given(steps=STEPS, num_epoch=st.integers(1, 3))
@examples(50)
def test_however_groups_are_opened_each_instance_and_epoch_is_one_group_and_all_are_counted(
    steps: list[Step], num_epoch: int
) -> None:
    with buffer_in_memory() as buffer:
        start: dict[str, Any] = {"job_id": "j", "n": 1, "ids": NAMES, "num_epoch": num_epoch}
        job = start_external(buffer, skip_instance_ids=[], **start)
        for at, (step, name) in enumerate(steps):
            if step == "next":
                buffer.open_groups(job.key, after=(-1, -1), limit=at)
            elif step == "write":
                write(buffer, job, written(f"u{at}", name))
            elif step == "claim":
                try_claim(buffer, job, name)
            else:
                start_external(buffer, skip_instance_ids=[name] if step == "resume" else [], **start)
            check(buffer, job, num_epoch)
        buffer.open_groups(job.key, after=(-1, -1), limit=100)
        everything = sorted((epoch, name) for epoch in range(num_epoch) for name in NAMES)
        assert sorted(named(groups(buffer, job))) == everything


def try_claim(buffer: Buffer, job: JobRecord, name: str) -> None:
    try:
        Claims(buffer).take(job.job_id, name)
    except (BusyError, ConflictError):
        with buffer.store.read() as connection:
            assert group_opening.open_next_of_instance(connection, job.key, name) is None


def check(buffer: Buffer, job: JobRecord, num_epoch: int) -> None:
    assert slot_counts(buffer, job)["submitted"] == len(NAMES) * num_epoch
    for name in NAMES:
        epochs = [group.epoch for group in groups(buffer, job) if group.instance_id == name]
        assert epochs == list(range(len(epochs))), "those with rows are the first epochs of their instance"
