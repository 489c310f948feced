"""Reading packs: many records in one go, whatever the file system can, and never a byte that was not written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.storage.pack_reader import FREE_BUFFERS, WINDOW_BYTES, WINDOWS_AHEAD, PackReader
from slime_plugins.rollout_buffer.storage.pack_writer import Blob, BlobRef, PackWriter, pack_path

SIZES = (0, 1, 30_000, 4083, 4084, 4096, WINDOW_BYTES, 30_000, 12, 3 * WINDOW_BYTES + 5, 100, 70_000, 70_000, 8)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PackReader]:
    """A reader of the packs in the test's folder."""
    reader = PackReader(tmp_path)
    yield reader
    reader.close()


ReadEach = Callable[[Iterable[BlobRef]], Iterator[tuple[BlobRef, memoryview]]]


@pytest.fixture(params=["at once", "ahead"])
def read_each(request: pytest.FixtureRequest, reader: PackReader) -> Iterator[ReadEach]:
    """The two ways to read many records, which promise the same."""
    with ThreadPoolExecutor(2) as pool:
        yield reader.each if request.param == "at once" else lambda places: reader.begin(places, pool).each()


def stored(folder: Path) -> dict[BlobRef, bytes]:
    """Records of many sizes in several packs, written one by one and together."""
    writer = PackWriter(folder, limit_bytes=5_000_000)
    datas = [os.urandom(size) for size in SIZES]
    places = [place for data in datas for place in writer.append([Blob(data)])]
    places += writer.append([Blob(data) for data in datas])
    writer.close()
    assert len({place.pack for place in places}) > 1
    return dict(zip(places, [*datas, *datas], strict=True))


def test_any_choice_of_records_comes_back_once_each_in_the_order_of_the_disk(
    tmp_path: Path, read_each: ReadEach
) -> None:
    records = stored(tmp_path)
    seed = random.Random(5)
    for count in (1, 2, 5, 9, len(records)):
        chosen = seed.sample(list(records), count)
        found = [(place, bytes(data)) for place, data in read_each([*chosen, *chosen])]
        expected = sorted(chosen)
        assert found == [(place, records[place]) for place in expected]


def test_the_screenshots_of_an_episode_are_read_at_once(
    tmp_path: Path, reader: PackReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PackWriter(tmp_path)
    places = writer.append([Blob(os.urandom(30_000)) for _ in range(25)])
    writer.close()
    reads: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert len(list(reader.each(places))) == 25
    assert reads == [0]


@pytest.mark.parametrize("how", ["refuses the flag", "takes the flag and refuses the read"])
def test_a_file_system_that_cannot_go_past_the_page_cache_is_read_through_it(
    tmp_path: Path, reader: PackReader, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    records = stored(tmp_path)
    preadv = os.preadv
    direct: set[int] = set()

    def fcntl(descriptor: int, _command: int, flags: int) -> int:
        if flags & os.O_DIRECT and how == "refuses the flag":
            raise OSError(errno.EINVAL, "Invalid argument")
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return 0

    def refusing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr("fcntl.fcntl", fcntl)
    monkeypatch.setattr(os, "preadv", refusing)
    assert {place: bytes(data) for place, data in reader.each(records)} == records


def test_a_pack_that_was_cut_gives_what_is_left_and_says_what_is_gone(tmp_path: Path, read_each: ReadEach) -> None:
    writer = PackWriter(tmp_path)
    first, second, third = writer.append([Blob(b"a" * 5000), Blob(b"b" * 5000), Blob(b"c" * 5000)])
    writer.close()
    os.chmod(pack_path(tmp_path, 1), 0o644)
    os.truncate(pack_path(tmp_path, 1), third.offset + 100)
    assert [bytes(data[:1]) for _, data in read_each([second, first])] == [b"a", b"b"]
    with pytest.raises(DamagedError, match="not what was written"):
        list(read_each([first, second, third]))
    with pytest.raises(DamagedError, match="cannot be read"):
        list(read_each([BlobRef(99, 0, 5, b"owner of")]))


class CountingPool(Executor):
    """Does its work when it is given, and counts it."""

    def __init__(self) -> None:
        self.begun = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.begun += 1
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def test_reading_ahead_holds_few_windows_and_ends_when_nobody_wants_more(tmp_path: Path, reader: PackReader) -> None:
    writer = PackWriter(tmp_path)
    places = writer.append([Blob(os.urandom(WINDOW_BYTES)) for _ in range(8)])
    writer.close()
    pool = CountingPool()
    reading = reader.begin(places, pool)
    assert pool.begun == WINDOWS_AHEAD
    records = reading.each()
    next(records)
    next(records)
    assert pool.begun == WINDOWS_AHEAD + 2
    reading.cancel()
    assert len(list(records)) == WINDOWS_AHEAD
    assert pool.begun == WINDOWS_AHEAD + 2


def test_windows_that_were_abandoned_are_no_leak(tmp_path: Path, reader: PackReader) -> None:
    writer = PackWriter(tmp_path)
    places = writer.append([Blob(os.urandom(1000)) for _ in range(3)])
    writer.close()
    for _ in range(3 * FREE_BUFFERS):
        next(reader.each(places))
        next(reader.begin(places, CountingPool()).each())
    assert 1 <= len(reader._buffers) <= FREE_BUFFERS


def test_a_pack_that_has_the_number_of_one_that_was_removed_is_read_and_not_the_removed_one(
    tmp_path: Path, reader: PackReader
) -> None:
    """Retention removes packs in another process, which cannot tell the readers; the next pack takes the number."""
    found = []
    for data in (b"first" * 100, b"second" * 100):
        writer = PackWriter(tmp_path)
        (place,) = writer.append([Blob(data)])
        found.append(reader.read(place))
        writer.close()
        pack_path(tmp_path, place.pack).unlink()
    assert found == [b"first" * 100, b"second" * 100]
