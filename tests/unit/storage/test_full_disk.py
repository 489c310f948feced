"""A full disk refuses what is large and ends nothing: polls and acknowledgements live on room that was kept."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import (
    DatabaseDamagedError,
    RolloutBufferError,
    StorageFullError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.storage.pack_writer import Disk
from slime_plugins.rollout_buffer.storage.storage_errors import storage_error
from slime_plugins.rollout_buffer.storage.store import Store
from tests.asgi_client import create_app
from tests.small_disks import fill, make_read_only, mounted, mounted_ext4
from tests.support import poll, polled_delivery, slot_counts, start_external, uids, write, written

MIB = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    with mounted(tmp_path / "disk", megabytes=64) as folder:
        yield folder


@pytest.fixture
def full(small_disk: Path) -> Iterator[Buffer]:
    """A buffer with four groups ready, on a disk that another program then filled to the last byte."""
    buffer = Buffer(Store(small_disk / "data"))
    assert buffer.store.allocate_reserve()
    job = start_external(buffer, 2, job_id="j")
    for number in range(4):
        write(buffer, job, written(f"{number}a", str(number)), written(f"{number}b", str(number), 0.0))
    fill(small_disk)
    yield buffer
    buffer.store.close()


def test_polls_and_acks_go_on_while_writes_are_refused(full: Buffer) -> None:
    job = full.job("j")
    for number in range(4):
        with pytest.raises(StorageFullError, match="full"):
            write(full, job, written(f"late{number}"))
        delivery = polled_delivery(full, job, lease_s=60, max_groups=1)
        assert uids(full, delivery) == [f"{number}a", f"{number}b"]
        assert full.acknowledge([delivery.delivery_id])["acked"] == [delivery.delivery_id]
    assert slot_counts(full, job)["delivered"] == 8


def test_a_job_is_not_started_into_the_room_that_was_kept(full: Buffer) -> None:
    full.change_job("j", "pause")  # a small change is recorded
    with pytest.raises(StorageFullError):
        start_external(full, 2, job_id="another")


def test_the_room_lasts_for_thousands_of_small_writes(full: Buffer) -> None:
    for number in range(3000):
        full.beat("supervisor", number, {"task_types": {}})
    assert full.heartbeat("supervisor") is not None


def test_a_store_opens_on_a_full_disk_and_says_what_is_wrong(full: Buffer) -> None:
    full.store.close()
    again = Buffer(Store(full.store.data_dir))
    trouble = again.store.trouble()
    assert trouble is not None
    assert "is full" in trouble
    assert "make room" in trouble
    assert uids(again, poll(again, again.job("j"), max_groups=1)) == ["0a", "0b"]
    again.store.close()


def test_when_there_is_room_again_all_is_as_before(full: Buffer, small_disk: Path) -> None:
    job = full.job("j")
    with pytest.raises(StorageFullError):
        write(full, job, written("4a", "4"))
    (small_disk / "ballast").unlink()
    assert full.store.trouble() is not None, "the room is kept first"
    assert full.store.allocate_reserve()
    assert full.store.trouble() is None
    assert write(full, job, written("4a", "4"), written("4b", "4", 0.0)) == ["stored", "stored"]


def test_a_disk_that_was_full_from_the_start_is_not_filled_further(small_disk: Path) -> None:
    fill(small_disk, leave=MIB)
    store = Store(small_disk / "data")
    assert not store.allocate_reserve()
    with pytest.raises(StorageFullError):
        store.check_room()
    store.close()


def test_writes_get_507_and_polls_their_groups_over_http(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(ServeSettings.model_validate({"data_dir": small_disk / "data"}))
    context: ServerContext = app.extensions["rollout_buffer"]
    client = app.test_client()
    start_external(context.buffer, 1, job_id="j")
    assert client.post("/buffer/write", json=written("a")).status_code == 200
    context.buffer.store.allocate_reserve()
    fill(small_disk)
    refused = client.post("/buffer/write", json=written("b"))
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (507, "storage_full")
    for _ in range(50):
        assert client.post("/buffer/write", json=written("b")).status_code == 507
    lines = [record for record in caplog.records if "/buffer/write" in record.getMessage()]
    assert 1 <= len(lines) <= 3, "the log lies on the full disk too"
    got = client.post("/get_rollout_data", json={"lease_s": 60}).get_json()["data"]
    assert [item["uid"] for item in got["data"]] == ["a"]
    assert client.post("/ack", json={"delivery_id": got["meta_info"]["delivery_id"]}).status_code == 200
    context.buffer.store.close()


# --- a disk that does not work ---------------------------------------------------------------------------------------


class BrokenDisk(Disk):
    """A disk that refuses every write in one way."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, descriptor: int, pieces: Iterable[bytes | memoryview], offset: int) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.EIO, UnavailableError, "look at dmesg"),
        (errno.EROFS, UnavailableError, "read-only"),
        (errno.EMFILE, UnavailableError, "ulimit -n"),
        (errno.EDQUOT, StorageFullError, "make room"),
    ],
)
def test_a_disk_that_does_not_work_is_a_sentence_with_what_to_do(
    tmp_path: Path, number: int, kind: type[RolloutBufferError], says: str
) -> None:
    buffer = Buffer(Store(tmp_path, disk=BrokenDisk(number)))
    job = start_external(buffer)
    with pytest.raises(kind, match=says):
        write(buffer, job, written("u", messages=[{"role": "user", "content": "x" * 100_000}]))
    buffer.store.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_IOERR, UnavailableError),
        (sqlite3.SQLITE_READONLY, UnavailableError),
        (sqlite3.SQLITE_CANTOPEN, UnavailableError),
        (sqlite3.SQLITE_BUSY, UnavailableError),
        (sqlite3.SQLITE_FULL, StorageFullError),
        (sqlite3.SQLITE_CORRUPT, DatabaseDamagedError),
        (sqlite3.SQLITE_NOTADB, DatabaseDamagedError),
        (sqlite3.SQLITE_IOERR_WRITE, UnavailableError),
    ],
)
def test_each_error_of_the_database_about_the_disk_has_its_class(
    tmp_path: Path, code: int, kind: type[RolloutBufferError]
) -> None:
    error = sqlite3.OperationalError("it fails")
    error.sqlite_errorcode = code
    assert type(storage_error(error, tmp_path)) is kind


def test_a_mistake_in_a_statement_stays_a_defect(buffer: Buffer) -> None:
    with pytest.raises(sqlite3.OperationalError, match="syntax"), buffer.store.read() as connection:
        connection.execute("SELEKT 1")


def test_reads_go_on_when_the_file_system_turns_read_only(tmp_path: Path) -> None:
    with mounted_ext4(tmp_path / "image", tmp_path / "disk", megabytes=64) as disk:
        buffer = Buffer(Store(disk / "data"))
        job = start_external(buffer, 1, job_id="j")
        write(buffer, job, written("a"))
        assert buffer.store.trouble() is None
        make_read_only(disk)
        time.sleep(1.1)  # the disk is tried once a second
        assert describe_job(buffer.store, job)["outcomes"] == {"completed": 1}
        for refused in (lambda: write(buffer, job, written("b")), lambda: poll(buffer, job)):
            with pytest.raises(UnavailableError, match="look at dmesg"):
                refused()
        trouble = buffer.store.trouble()
        assert trouble is not None
        assert "read-only" in trouble
        buffer.store.close()


@pytest.mark.parametrize("dies", [False, True], ids=["beside others", "alone"])
def test_who_starts_on_a_file_system_that_turned_read_only_reads_and_refuses_writes(tmp_path: Path, dies: bool) -> None:
    with mounted_ext4(tmp_path / "image", tmp_path / "disk", megabytes=64) as disk:
        first = Buffer(Store(disk / "data"))
        job = start_external(first, 1, job_id="j")
        write(first, job, written("a"))
        first.store.clock.store_reference()
        make_read_only(disk)
        if dies:
            first.store.close()
        again = Buffer(Store(disk / "data"))
        assert describe_job(again.store, job)["outcomes"] == {"completed": 1}
        for refused in (lambda: write(again, job, written("b")), lambda: poll(again, job)):
            with pytest.raises(UnavailableError, match="look at dmesg"):
                refused()
        assert "read-only" in str(again.store.trouble())
        again.store.close()
        first.store.close()


# --- a damaged database ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["overwritten", "torn", "another file"])
def test_a_damaged_database_is_a_sentence_with_what_to_do(tmp_path: Path, damage: str) -> None:
    buffer = Buffer(Store(tmp_path))
    job = start_external(buffer)
    for number in range(50):
        write(buffer, job, written(f"u{number}", str(number)))
    buffer.store.close()
    path = tmp_path / "buffer.sqlite3"
    content = path.read_bytes()
    damaged = {
        "overwritten": content[:4096] + os.urandom(len(content) - 4096),
        "torn": content[: len(content) // 2],
        "another file": b"this is no database" * 1000,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(DatabaseDamagedError, match=r"docs/troubleshooting\.md"):
        Buffer(Store(tmp_path)).jobs()


@pytest.mark.parametrize(
    ("column", "garbage"), [("cause", b"\xff\xfe"), ("settings", b"\xff\xfe"), ("settings", b"}{")]
)
def test_a_garbled_text_of_the_database_is_the_same_sentence(tmp_path: Path, column: str, garbage: bytes) -> None:
    buffer = Buffer(Store(tmp_path))
    start_external(buffer)
    with buffer.store.write() as connection:
        connection.execute(f"UPDATE jobs SET {column} = CAST(? AS TEXT)", (garbage,))
    with pytest.raises(DatabaseDamagedError, match=r"docs/troubleshooting\.md"):
        buffer.jobs()
