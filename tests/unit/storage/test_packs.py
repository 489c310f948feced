"""Packs and commits: what is answered is on the disk before, whatever happens to the process or the disk after."""

from __future__ import annotations

import errno
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from flask.testing import FlaskClient

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, NotFoundError, StorageFullError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.state import recovery
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage.group_commit import GroupCommit, Ticket
from slime_plugins.rollout_buffer.storage.pack_writer import Blob, BlobRef, Disk, pack_path, packs_in
from slime_plugins.rollout_buffer.storage.store import Store, Work
from slime_plugins.rollout_buffer.storage.tables import image_rows, payload_rows, service_rows
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire.inline_images import extract_images
from tests.stored_bytes import find_damage
from tests.support import PNG, delivered_items, poll, polled_delivery, start_external, uids, write, written

BIG = "x" * 100_000


def shot(number: int) -> Image:
    """A screenshot unlike any other."""
    return Image(data=PNG + number.to_bytes(4, "big"))


def episode(uid: str, instance_id: str = "i", reward: float = 1.0, *, shots: Iterable[Image] = ()) -> dict[str, Any]:
    """An item with screenshots inline and a payload that goes into a pack."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": wire.encode_data_uri(image.data)}} for image in shots
    ]
    parts.append({"type": "text", "text": BIG})
    return written(uid, instance_id, reward, messages=[{"role": "user", "content": parts}])


class RecordingDisk(Disk):
    """Notes what happens to files, in one list with what happens to the database."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.failure: OSError | None = None

    def write(self, descriptor: int, pieces: Iterable[bytes | memoryview], offset: int) -> int:
        self.events.append("write")
        if self.failure is not None:
            super().write(descriptor, list(pieces)[:1], offset)
            raise self.failure
        return super().write(descriptor, pieces, offset)

    def sync(self, descriptor: int) -> None:
        self.events.append("fsync")
        super().sync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self.events.append("fsync folder")
        super().sync_folder(folder)


class TracedStore(Store):
    """A store whose database notes its inserts and commits."""

    def __init__(self, data_dir: Path, disk: RecordingDisk) -> None:
        self.events = disk.events
        super().__init__(data_dir, disk=disk)

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        connection.set_trace_callback(self._note)
        return connection

    def _note(self, statement: str) -> None:
        if not statement.startswith(("INSERT INTO trajectories", "INSERT INTO images", "COMMIT")):
            return
        event = " ".join(statement.split()[:3])
        # A row's statement is traced once more for each step of its triggers.
        if not (event == "INSERT INTO trajectories" and self.events[-1] == event):
            self.events.append(event)


@pytest.fixture
def disk() -> RecordingDisk:
    """File operations on record."""
    return RecordingDisk([])


@pytest.fixture
def traced(tmp_path: Path, disk: RecordingDisk, clock: SettableClock) -> Iterator[Buffer]:
    """A buffer whose file operations and statements are on record."""
    buffer = Buffer(TracedStore(tmp_path / "data", disk), clock=clock)
    yield buffer
    buffer.store.close()


# --- order -----------------------------------------------------------------------------------------------------------


def test_bytes_are_fsynced_before_their_row_and_the_row_is_committed_before_the_answer(
    traced: Buffer, disk: RecordingDisk
) -> None:
    job = start_external(traced)
    disk.events.clear()
    assert write(traced, job, episode("u", shots=[shot(1), shot(2)])) == ["stored"]
    images, row = "INSERT INTO images", "INSERT INTO trajectories"
    assert [event for event in disk.events if event != "COMMIT"] == [
        "fsync folder",
        "write",
        "fsync",
        images,
        images,
        row,
    ]
    assert disk.events[-1] == "COMMIT"


def test_a_commit_is_an_fsync(buffer: Buffer) -> None:
    with buffer.store.read() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_the_write_and_loses_nothing(traced: Buffer, disk: RecordingDisk) -> None:
    job = start_external(traced)
    assert write(traced, job, episode("before")) == ["stored"]
    disk.failure = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageFullError):
        write(traced, job, episode("refused", shots=[shot(1)]))
    with pytest.raises(StorageFullError):
        write(traced, job, episode("refused", shots=[shot(1)]))
    disk.failure = None
    assert write(traced, job, episode("refused", reward=0.0, shots=[shot(1)])) == ["stored"]
    assert uids(traced, poll(traced, job)) == ["before", "refused"]
    assert list(find_damage(traced.store)) == []


# --- crashes ---------------------------------------------------------------------------------------------------------

CRASHING_WRITER = """
import sys
from pathlib import Path
from slime_plugins.rollout_buffer.storage.pack_writer import Blob
from slime_plugins.rollout_buffer.storage.store import Store, Work
store = Store(Path(sys.argv[1]))
store.append([Blob(b"never named by a row" * 1000)])
print("appended", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_without_a_row_is_cut_off(buffer: Buffer) -> None:
    job = start_external(buffer)
    subprocess.run([sys.executable, "-c", CRASHING_WRITER, str(buffer.store.data_dir), "die"], check=False)
    (left,) = buffer.store.packs_dir.iterdir()
    assert left.stat().st_size > 20_000
    assert write(buffer, job, episode("u")) == ["stored"]
    report = recover(buffer.store)
    assert (report.removed_packs, report.damaged) == (1, [])
    assert not left.exists()
    assert len(list(buffer.store.packs_dir.iterdir())) == 1, "the pack of a living process is left alone"
    assert list(find_damage(buffer.store)) == []


def test_a_torn_tail_is_cut_behind_the_last_row(tmp_path: Path, clock: SettableClock) -> None:
    first = Buffer(Store(tmp_path / "data"), clock=clock)
    job = start_external(first)
    write(first, job, episode("u", shots=[shot(1)]))
    first.store.append([Blob(b"no row yet" * 5000)])
    first.store.close()
    (pack,) = first.store.packs_dir.iterdir()
    with pack.open("ab") as file:
        file.write(b"half a rec")
    second = Buffer(Store(tmp_path / "data"), clock=clock)
    assert recover(second.store).cut_bytes > 50_000
    assert recover(second.store).cut_bytes == 0, "once is enough"
    assert write(second, job, episode("v", reward=0.0)) == ["stored"]
    assert uids(second, poll(second, job)) == ["u", "v"]
    assert list(find_damage(second.store)) == []
    second.store.close()


def test_rows_of_a_process_that_ends_during_recovery_keep_their_bytes(
    buffer: Buffer, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_external(buffer)

    def end_meanwhile(folder: Path) -> list[int]:
        gateway = Buffer(Store(buffer.store.data_dir), clock=clock)
        write(gateway, job, episode("u", shots=[shot(1)]))
        gateway.store.close()
        return packs_in(folder)

    monkeypatch.setattr(recovery, "packs_in", end_meanwhile)
    assert recover(buffer.store).removed_packs == 0
    assert list(find_damage(buffer.store)) == []


def test_the_pack_of_a_living_process_is_not_touched(buffer: Buffer) -> None:
    command = [sys.executable, "-c", CRASHING_WRITER, str(buffer.store.data_dir), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"appended\n"
        assert recover(buffer.store).cut_bytes == 0
        writer.communicate(b"")
    assert recover(buffer.store).removed_packs == 1


def test_rows_whose_bytes_are_gone_are_reported_and_do_not_block_the_others(
    tmp_path: Path, clock: SettableClock
) -> None:
    first = Buffer(Store(tmp_path / "data"), clock=clock)
    job = start_external(first)
    write(first, job, episode("whole"))
    first.store.close()
    second = Buffer(Store(tmp_path / "data"), clock=clock)
    write(second, job, episode("gone", reward=0.0))
    second.store.close()
    pack_path(second.store.packs_dir, 2).unlink()
    third = Buffer(Store(tmp_path / "data"), clock=clock)
    (sentence,) = recover(third.store).damaged
    assert sentence.startswith("trajectory gone is lost")
    delivery = polled_delivery(third, job)
    whole, gone = delivered_items(third, delivery)
    assert whole[0]["remove_sample"] is False
    assert gone[0]["remove_sample"] is True
    assert describe_job(third.store, job)["damaged"] == 1
    third.store.close()


# --- damage ----------------------------------------------------------------------------------------------------------


def spoil(store: Store, place: BlobRef) -> None:
    """Turns a byte of a record over."""
    with pack_path(store.packs_dir, place.pack).open("r+b") as file:
        file.seek(place.end - 3)
        byte = file.read(1)
        file.seek(place.end - 3)
        file.write(bytes([byte[0] ^ 0xFF]))


def place_of(buffer: Buffer, uid: str) -> BlobRef:
    """Where the payload of a trajectory is."""
    with buffer.store.read() as connection:
        return next(place for _, found, place in payload_rows.payload_refs(connection) if found == uid)


@pytest.mark.parametrize("what", ["payload", "image"])
def test_a_damaged_member_is_a_dummy_that_says_so_and_its_siblings_are_delivered(
    client: FlaskClient, what: str
) -> None:
    context: ServerContext = client.application.extensions["rollout_buffer"]
    buffer = context.buffer
    job = start_external(buffer)
    assert client.post("/buffer/write", json=episode("bad", shots=[shot(1)])).status_code == 200
    assert client.post("/buffer/write", json=episode("good", reward=0.0, shots=[shot(2)])).status_code == 200
    with buffer.store.read() as connection:
        places = image_rows.image_refs(connection, [shot(1).sha256])
    spoil(buffer.store, place_of(buffer, "bad") if what == "payload" else places[shot(1).sha256])
    data = wire.decode_rollout_data(client.post("/get_rollout_data", json={"lease_s": 60}).get_json())
    bad, good = data.items
    assert (bad.uid, bad.remove_sample, bad.reward, bad.outcome) == ("bad", True, 0.0, "failed")
    assert "not what was written" in bad.extra_info["error"]
    assert good.messages == tuple(episode("good", shots=[shot(2)])["messages"])
    assert describe_job(buffer.store, job)["damaged"] == 1
    assert len(list(find_damage(buffer.store))) == 1


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"\x00", b"", b"[]"])
def test_a_payload_that_is_garbled_in_its_row_is_damaged_like_one_in_a_pack(
    client: FlaskClient, garbage: bytes
) -> None:
    buffer = client.application.extensions["rollout_buffer"].buffer
    start_external(buffer)
    assert client.post("/buffer/write", json={"items": [written("bad"), written("good", reward=0)]}).status_code == 200
    with buffer.store.write() as connection:
        connection.execute(
            "UPDATE trajectories SET body = CAST(? || substr(body, 9) AS BLOB) WHERE uid = 'bad'", (garbage,)
        )
    refused = client.get("/trajectories/bad")
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (500, "damaged")
    bad, good = wire.decode_rollout_data(client.post("/get_rollout_data", json={"lease_s": 60}).get_json()).items
    assert (bad.uid, bad.remove_sample, good.uid, good.remove_sample) == ("bad", True, "good", False)


def test_a_damaged_image_is_mended_by_putting_it_again(client: FlaskClient) -> None:
    context: ServerContext = client.application.extensions["rollout_buffer"]
    image, path = shot(1), f"/images/{shot(1).sha256}"
    assert client.put(path, data=image.data).status_code == 201
    with context.buffer.store.read() as connection:
        place = image_rows.image_refs(connection, [image.sha256])[image.sha256]
    spoil(context.buffer.store, place)
    refused = client.get(path)
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (500, "damaged")
    assert client.put(path, data=image.data).status_code == 201
    assert client.get(path).data == image.data
    assert client.put(path, data=image.data).status_code == 200, "whole again, so nothing is written"


# --- images ----------------------------------------------------------------------------------------------------------


def test_an_image_is_put_under_its_hash_and_under_no_other(client: FlaskClient) -> None:
    image = shot(1)
    assert client.put(f"/images/{image.sha256}", data=image.data).get_json() == {
        "sha256": image.sha256,
        "created": True,
    }
    assert client.put(f"/images/{image.sha256}", data=image.data).get_json()["created"] is False
    assert client.put(f"/images/{'0' * 64}", data=image.data).status_code == 400
    assert client.put(f"/images/{image.sha256}", data=b"no picture").status_code == 400
    assert client.get(f"/images/{image.sha256}").data == image.data


def test_an_item_may_name_images_that_were_put_before_and_no_others(buffer: Buffer) -> None:
    job = start_external(buffer, n=1)

    def naming(uid: str, name: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": f"sha256:{name}"}}
        return written(uid, uid, messages=[{"role": "user", "content": [part]}])

    with pytest.raises(InvalidPayloadError, match="not stored: PUT them"):
        write(buffer, job, naming("a", shot(1).sha256))
    with pytest.raises(InvalidPayloadError, match="64 lower-case hex digits"):
        write(buffer, job, naming("a", "ABC"))
    assert buffer.payloads.store_image(shot(1))
    assert write(buffer, job, naming("a", shot(1).sha256)) == ["stored"]
    with pytest.raises(NotFoundError):
        buffer.payloads.image("../" * 5)


def test_identical_images_of_concurrent_writers_are_stored_once(buffer: Buffer) -> None:
    job = start_external(buffer, n=16)
    same = [shot(number) for number in range(5)]
    failures: list[BaseException] = []

    def drive(writer: int) -> None:
        try:
            for number in range(4):
                assert write(buffer, job, episode(f"{writer}-{number}", f"g{number}", shots=same)) == ["stored"]
        except BaseException as error:  # noqa: BLE001 - shown by the test, since a thread's own is lost
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    stored = b"".join(path.read_bytes() for path in buffer.store.packs_dir.iterdir())
    assert [stored.count(image.data) for image in same] == [1] * 5


CONCURRENT_WRITER = """
import sys
from pathlib import Path
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store, Work
from tests.support import write
from tests.unit.storage.test_packs import episode, shot
buffer = Buffer(Store(Path(sys.argv[1])))
job = buffer.job("j")
for number in range(6):
    item = episode(f"{sys.argv[2]}-{number}", f"g{number}", float(sys.argv[2]) % 2, shots=[shot(number), shot(99)])
    assert write(buffer, job, item) == ["stored"]
buffer.store.close()
"""


def test_several_processes_write_at_once_while_another_reads(buffer: Buffer) -> None:
    job = start_external(buffer, n=3, job_id="j")
    command = [sys.executable, "-c", CONCURRENT_WRITER, str(buffer.store.data_dir)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(3)]
    got: list[str] = []
    while any(process.poll() is None for process in writers):
        got += uids(buffer, poll(buffer, job, max_groups=1))
    got += uids(buffer, poll(buffer, job))
    assert [process.returncode for process in writers] == [0] * 3
    assert sorted(got) == sorted(f"{writer}-{number}" for writer in range(3) for number in range(6))
    assert list(find_damage(buffer.store)) == []
    recover(buffer.store)
    assert list(find_damage(buffer.store)) == [], "recovery cuts off only what no row names"


def test_of_one_uid_twice_in_one_call_the_first_counts_as_a_whole(buffer: Buffer) -> None:
    job = start_external(buffer, n=1)
    first, second = episode("u", shots=[shot(1)]), episode("u", reward=0.0, shots=[shot(2)])
    assert write(buffer, job, first, second) == ["stored", "duplicate"]
    delivery = polled_delivery(buffer, job)
    ((light, body),) = delivered_items(buffer, delivery, inline_images=True)
    assert (light["reward"], orjson.loads(body)["messages"]) == (1.0, first["messages"])


# --- the parts -------------------------------------------------------------------------------------------------------


def test_work_that_waits_is_done_together_and_each_caller_gets_its_own(tmp_path: Path) -> None:
    batches: list[int] = []
    gate = threading.Event()

    def process(batch: Any) -> None:
        gate.wait(10)
        batches.append(len(batch))
        for ticket in batch:
            if ticket.work % 5 == 0:
                ticket.error = ValueError(ticket.work)
            else:
                ticket.result = ticket.work * 2

    commits: GroupCommit[int] = GroupCommit(process)
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        try:
            results[number] = commits.run(number)
        except ValueError as error:
            results[number] = error.args[0]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert results == {number: number if number % 5 == 0 else number * 2 for number in range(20)}
    assert sum(batches) == 20
    assert len(batches) < 20


def test_an_error_of_the_whole_batch_reaches_every_caller() -> None:
    def process(batch: Any) -> None:
        raise StorageFullError("full")

    commits: GroupCommit[int] = GroupCommit(process)
    with pytest.raises(StorageFullError):
        commits.run(1)
    with pytest.raises(StorageFullError):
        commits.run(2)
    assert not Ticket(work=1).done


def test_a_refused_write_does_not_undo_what_is_committed_with_it(buffer: Buffer) -> None:
    def good(connection: sqlite3.Connection) -> str:
        service_rows.beat(connection, "good", 1, 0.0, {})
        return "done"

    def bad(connection: sqlite3.Connection) -> None:
        service_rows.beat(connection, "bad", 1, 0.0, {})
        raise ValueError("no")

    first: Ticket[Work] = Ticket(work=bad)
    second: Ticket[Work] = Ticket(work=good)
    buffer.store._commit_batch([first, second])
    assert (str(first.error), second.result) == ("no", "done")
    assert buffer.heartbeat("bad") is None
    assert buffer.heartbeat("good") is not None


@pytest.mark.parametrize(
    "content",
    [
        b'{"text":"\\"url\\":\\"data:image/png;base64,AAAA\\""}',
        b'{"note":"data:image/png;base64,AAAA"}',
        b'{"url":"data:image/png;base64,AAAA"}',
        b'{"url":"data:image/png;base64,####"}',
        b'{"url":"data:image/png;base64,',
        b'{"url":"data:image/svg+xml;base64,AAAA"}',
        b"",
    ],
)
def test_what_is_not_certainly_a_whole_image_stays_where_it_is(content: bytes) -> None:
    assert extract_images(content) == (content, {})


def test_images_are_cut_out_whatever_the_spacing() -> None:
    uri = wire.encode_data_uri(PNG).encode()
    content = b'[{"url":"%s"},{"url" :\n "%s"},"x"]' % (uri, uri)
    name = b"sha256:" + Image(data=PNG).sha256.encode()
    after, images = extract_images(bytearray(content))
    assert after == b'[{"url":"%s"},{"url" :\n "%s"},"x"]' % (name, name)
    assert [image.data for image in images.values()] == [PNG]
