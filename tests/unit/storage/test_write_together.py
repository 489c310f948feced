"""Writes that are stored together: each as if it came alone, and all of them with one fsync."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import (
    ConflictError,
    InvalidPayloadError,
    NotFoundError,
    RewardRangeError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.state.item_writes import Write
from slime_plugins.rollout_buffer.storage.pack_writer import Disk
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.wire.delivery_replies import WriteResult
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item
from tests.example_counts import examples
from tests.support import poll, slot_counts, start_external, uids, written

LONG = {"note": "x" * 40_000}
"""Makes a payload so large that it goes into a pack."""


class CountingDisk(Disk):
    """Counts fsyncs, and fails them while told to."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs = 0
        self.broken = False

    def sync(self, descriptor: int) -> None:
        self.syncs += 1
        if self.broken:
            raise OSError(errno.EIO, "the disk is broken")
        super().sync(descriptor)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


@pytest.fixture
def buffer(tmp_path: Path, disk: CountingDisk) -> Any:
    found = Buffer(Store(tmp_path / "data", disk=disk))
    yield found
    found.store.close()


def a_write(job_id: str | None, *items: dict[str, Any]) -> Write:
    return Write(job_id, [decode_written_item(item) for item in items])


def told(outcomes: Sequence[tuple[JobRecord, list[WriteResult]] | Exception]) -> list[list[str] | str]:
    """What each write was told: the statuses of its items, or the name of its error."""
    return [
        type(outcome).__name__ if isinstance(outcome, Exception) else [result.status for result in outcome[1]]
        for outcome in outcomes
    ]


def test_many_writes_share_one_fsync(buffer: Buffer, disk: CountingDisk) -> None:
    job = start_external(buffer, n=1)
    outcomes = buffer.write_together(
        [a_write(job.job_id, written(f"u{n}", f"i{n}", extra_info=LONG)) for n in range(10)]
    )
    assert told(outcomes) == [["stored"]] * 10
    assert disk.syncs == 1
    assert slot_counts(buffer, job)["ready"] == 10


def test_one_that_cannot_be_kept_fails_alone(buffer: Buffer) -> None:
    job = start_external(buffer, n=1)
    unknown = {"type": "image_url", "image_url": {"url": "sha256:" + "0" * 64}}
    outcomes = buffer.write_together(
        [
            a_write(job.job_id, written("a", "a", extra_info=LONG)),
            a_write(job.job_id, written("b", "b", messages=[{"role": "user", "content": [unknown]}])),
            a_write("nobody", written("c", "c")),
            a_write(job.job_id, written("d", "d"), written("e", "e")),
        ]
    )
    assert told(outcomes) == [["stored"], "InvalidPayloadError", "NotFoundError", ["stored", "stored"]]
    assert isinstance(outcomes[1], InvalidPayloadError)
    assert isinstance(outcomes[2], NotFoundError)
    assert uids(buffer, poll(buffer, job)) == ["a", "d", "e"]


def test_all_items_of_a_write_or_none_also_beside_others(buffer: Buffer) -> None:
    job = start_external(buffer, n=1, ids=("known", "other"))
    outcomes = buffer.write_together(
        [
            a_write(job.job_id, written("a", "known"), written("b", "unknown")),
            a_write(job.job_id, written("c", "other")),
        ]
    )
    assert told(outcomes) == ["ConflictError", ["stored"]]
    assert uids(buffer, poll(buffer, job)) == ["c"]


def test_a_broken_disk_fails_every_write_and_keeps_none(buffer: Buffer, disk: CountingDisk) -> None:
    job = start_external(buffer, n=1)
    writes = [a_write(job.job_id, written(f"u{n}", f"i{n}", extra_info=LONG)) for n in range(3)]
    disk.broken = True
    with pytest.raises(UnavailableError):
        buffer.write_together(writes)
    assert slot_counts(buffer, job).get("ready", 0) == 0

    disk.broken = False
    assert told(buffer.write_together(writes)) == [["stored"]] * 3


ITEMS = st.builds(
    lambda uid, instance, is_long: written(f"u{uid}", f"i{instance}", extra_info=LONG if is_long else {}),
    st.integers(0, 5),
    st.integers(0, 2),
    st.booleans(),
)
BATCHES = st.lists(st.lists(st.lists(ITEMS, min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=3)


@given(BATCHES)
@examples(40)
def test_writing_together_is_writing_one_after_the_other(batches: list[list[list[dict[str, Any]]]]) -> None:
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        together, apart = Buffer(Store(Path(one))), Buffer(Store(Path(other)))
        jobs = [start_external(each, n=2, job_id="j") for each in (together, apart)]
        for batch in batches:
            writes = [a_write("j", *items) for items in batch]
            assert told(together.write_together(writes)) == told([apart.write_together([one])[0] for one in writes])
        assert slot_counts(together, jobs[0]) == slot_counts(apart, jobs[1])
        assert uids(together, poll(together, jobs[0])) == uids(apart, poll(apart, jobs[1]))
        together.store.close()
        apart.store.close()


@pytest.mark.parametrize("fault", ["reward", "instance"])
def test_of_a_whole_write_that_is_refused_for_one_item_nothing_is_kept(buffer: Buffer, fault: str) -> None:
    ids = tuple(f"i{number}" for number in range(wire.MAX_ITEMS))
    job = start_external(buffer, 1, ids, reward_range=[0, 1])
    items = [written(f"u{each}", each) for each in ids]
    items[-1] = written("bad", "nowhere" if fault == "instance" else ids[-1], 1.0 if fault == "instance" else 7.0)
    (outcome,) = buffer.write_together([a_write(job.job_id, *items)])
    assert isinstance(outcome, ConflictError if fault == "instance" else RewardRangeError)
    assert slot_counts(buffer, job)["open"] == len(ids)
    with buffer.store.read() as connection:
        assert connection.execute("SELECT count(*) FROM trajectories").fetchone()[0] == 0
