"""A job of very many groups is written in parts: others get their turn, and nobody sees it before it is whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer, StartedJob
from slime_plugins.rollout_buffer.errors import NotFoundError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.protocol import request_models
from slime_plugins.rollout_buffer.protocol.request_models import StartPayload
from slime_plugins.rollout_buffer.state import large_starts
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Instance
from tests.support import poll, slots, start_external, uids, write, written


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows at once, so that a job of 25 instances is a large one."""
    monkeypatch.setattr(large_starts, "ROWS_AT_ONCE", 10)


class Interrupted(list[Instance]):
    """Instances, with something that happens when the twelfth is read for its line: between two parts."""

    def __init__(self, count: int, happens: Callable[[], None]) -> None:
        super().__init__(Instance(instance_id=f"i{n:02}", data={"instance_id": f"i{n:02}"}) for n in range(count))
        self._happens = happens
        self._readings = 0

    def __iter__(self) -> Iterator[Instance]:
        self._readings += 1
        for number, instance in enumerate(super().__iter__()):
            if self._readings == 2 and number == 11:  # the first reading takes their ids
                self._happens()
            yield instance


def start(buffer: Buffer, instances: list[Instance], **changes: Any) -> StartedJob:
    body = {"task_type": "external", "num_repeat_per_sample": 1, "num_epoch": 2, "job_id": "large", **changes}
    body["instances"] = [dict(instance.data) for instance in list.__iter__(instances)]
    return buffer.start_job(request_models.parse(StartPayload, body), instances)


def rows(buffer: Buffer, table: str) -> list[tuple[Any, ...]]:
    columns = {
        "groups": "epoch, position, instance_id, state, cause",
        "instances": "position, instance_id, line",
        "starts": "job_key, identity",
    }
    with buffer.store.read() as connection:
        return [tuple(row) for row in connection.execute(f"SELECT {columns[table]} FROM {table} ORDER BY 1, 2")]


def nothing() -> None:
    return None


def test_a_job_written_in_parts_is_the_job_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts, at_once = Buffer(Store(tmp_path / "parts")), Buffer(Store(tmp_path / "once"))
    skipped = {"skip_instance_ids": ["i03", "i03", "i07"]}
    start(in_parts, Interrupted(25, nothing), **skipped)
    monkeypatch.setattr(large_starts, "ROWS_AT_ONCE", 1000)
    start(at_once, Interrupted(25, nothing), **skipped)
    for table in ("groups", "instances"):
        assert rows(in_parts, table) == rows(at_once, table) != []
    assert rows(in_parts, "starts") == []
    assert slots(in_parts, in_parts.job("large")) == slots(at_once, at_once.job("large"))
    with in_parts.store.read() as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    for buffer in (in_parts, at_once):
        buffer.store.close()


def test_others_write_between_two_parts_and_see_nothing_of_the_job(buffer: Buffer) -> None:
    seen: list[Any] = []

    def others() -> None:
        small = start_external(buffer, 1, job_id="small")
        seen.append(write(buffer, small, written("u")))
        seen.append(uids(buffer, poll(buffer, small)))
        seen.append([job.job_id for job in buffer.jobs()])
        with pytest.raises(NotFoundError):
            buffer.job("large")

    started = start(buffer, Interrupted(25, others))
    assert seen == [["stored"], ["u"], ["small"]]
    assert slots(buffer, started.job)["open"] == 50
    assert started.job.key != buffer.job("small").key


def test_the_same_call_meanwhile_is_told_to_come_again_and_attaches_then(buffer: Buffer) -> None:
    def again() -> None:
        with pytest.raises(UnavailableError, match=r"being started \(10 rows are written\)"):
            start(buffer, Interrupted(25, nothing))

    assert not start(buffer, Interrupted(25, again)).attached
    assert start(buffer, Interrupted(25, nothing)).attached
    assert len(rows(buffer, "groups")) == 50


def test_a_start_that_fails_half_way_leaves_nothing_behind(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise StorageFullError("the disk is full")

    with pytest.raises(StorageFullError):
        start(buffer, Interrupted(25, full))
    assert [rows(buffer, table) for table in ("groups", "instances", "starts")] == [[], [], []]
    assert slots(buffer, start(buffer, Interrupted(25, nothing)).job)["open"] == 50


KILLED = """
import os, sys
from pathlib import Path
from slime_plugins.rollout_buffer.state import large_starts
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store
from tests.unit.state.test_large_starts import Interrupted, start
large_starts.ROWS_AT_ONCE = 10
start(Buffer(Store(Path(sys.argv[1])), clock=lambda: 1_000_000.0), Interrupted(25, lambda: os._exit(9)))
"""


@pytest.fixture
def interrupted(buffer: Buffer) -> Buffer:
    """A buffer in which a process was killed while it started a job."""
    command = [sys.executable, "-c", KILLED, str(buffer.store.data_dir)]
    assert subprocess.run(command, check=False).returncode == 9
    assert len(rows(buffer, "instances")) == 10
    assert buffer.jobs() == []
    return buffer


def test_a_start_whose_process_was_killed_is_undone_when_serve_starts(interrupted: Buffer) -> None:
    recover(interrupted.store)
    assert [rows(interrupted, table) for table in ("groups", "instances", "starts")] == [[], [], []]


def test_the_same_call_again_undoes_an_interrupted_start_and_makes_the_job(
    interrupted: Buffer, clock: SettableClock
) -> None:
    clock.advance(61.0)
    assert slots(interrupted, start(interrupted, Interrupted(25, nothing)).job)["open"] == 50
    assert (len(rows(interrupted, "instances")), rows(interrupted, "starts")) == (25, [])


def test_attaching_to_a_job_needs_no_room(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    start(buffer, Interrupted(25, nothing))

    def full() -> None:
        raise StorageFullError("the disk is full")

    monkeypatch.setattr(buffer.store, "check_room", full)
    assert start(buffer, Interrupted(25, nothing)).attached
