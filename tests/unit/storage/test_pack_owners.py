"""Numbers of packs are given once and records name their owner: nobody reads what is another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage.pack_reader import PackReader
from slime_plugins.rollout_buffer.storage.pack_writer import Blob, PackWriter, pack_path, packs_in
from slime_plugins.rollout_buffer.storage.retention import purge
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.support import delivered_items, poll, polled_delivery, start_external, write
from tests.unit.storage.test_packs import episode, place_of


def reopened(buffer: Buffer) -> Buffer:
    """The same data directory, opened by the next process."""
    buffer.store.close()
    return Buffer(Store(buffer.store.data_dir))


def test_after_the_newest_pack_was_lost_nobody_gets_anothers_trajectory(tmp_path: Path) -> None:
    buffer = Buffer(Store(tmp_path))
    job = start_external(buffer, 2, job_id="j")
    write(buffer, job, episode("lost-0"))
    lost = place_of(buffer, "lost-0")
    pack_path(buffer.store.packs_dir, lost.pack).unlink()
    buffer = reopened(buffer)
    write(buffer, job, episode("mine-0", reward=0.0))  # of the same length, at the same offset
    mine = place_of(buffer, "mine-0")
    assert (mine.offset, mine.length) == (lost.offset, lost.length)
    assert mine.pack > lost.pack
    delivery = polled_delivery(buffer, job)
    kept = {light["uid"]: light["remove_sample"] for light, _ in delivered_items(buffer, delivery)}
    assert kept == {"lost-0": True, "mine-0": False}
    buffer.store.close()


def test_a_number_is_not_given_again_after_retention_or_mending(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, 1, job_id="j")
    numbers = []
    for round_ in range(3):
        write(buffer, job, episode(f"u{round_}", f"i{round_}"))
        poll(buffer, job)
        numbers.append(place_of(buffer, f"u{round_}").pack)
        buffer.store._writer.close()
        clock.advance(100.0)
        purge(buffer.store, now=clock.now, retain_s=50.0)
        buffer.store.append([Blob(b"no row names it" * 1000)])
        buffer.store._writer.close()
        recover(buffer.store)
        assert packs_in(buffer.store.packs_dir) == []
    assert len(set(numbers)) == 3
    assert numbers == sorted(numbers)


def test_every_process_gets_a_number_of_its_own(tmp_path: Path) -> None:
    stores = [Store(tmp_path) for _ in range(4)]
    numbers = [store.append([Blob(b"x", owner="u")])[0].pack for store in stores for _ in range(2)]
    assert sorted(set(numbers)) == [1, 2, 3, 4]
    for store in stores:
        store.close()


def test_a_whole_record_of_somebody_else_is_not_read(tmp_path: Path) -> None:
    writer, reader = PackWriter(tmp_path), PackReader(tmp_path)
    first, second = writer.append([Blob(b"a" * 5000, owner="one"), Blob(b"b" * 5000, owner="other")])
    writer.close()
    path = pack_path(tmp_path, first.pack)
    path.chmod(0o600)
    content = path.read_bytes()
    path.write_bytes(content[second.offset : second.end] + content[first.offset : first.end] + content[second.end :])
    for place in (first, second):
        with pytest.raises(DamagedError, match="not what was written"):
            reader.read(place)
    assert reader.read(first._replace(owner=second.owner)) == b"b" * 5000, "it is whole, and the other's"
    reader.close()


@pytest.mark.parametrize("name", ["00000001.pack", "00000007.pack", "notes.pack", "²³.pack", f"{10**22}.pack"])
def test_a_folder_named_like_a_pack_stops_neither_the_start_nor_writes(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    (store.packs_dir / name).mkdir()
    assert recover(store).damaged == []
    place = store.append([Blob(b"x" * 100, owner="u")])[0]
    assert store.fetch(place) == b"x" * 100
    assert store.used_bytes() > 0
    store.close()
