"""The queue between connections and the disk: together where there are many, alone where one is wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_plugins.rollout_buffer.storage import write_batcher
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher


class Keeper:
    """Answers each body with itself, one batch at a time, when the test lets it."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, bodies: Sequence[bytes]) -> list[bytes]:
        self.gate.wait(20)
        self.batches.append(list(bodies))
        if b"all fail" in bodies:
            raise RuntimeError("no disk")
        return [b"kept " + body for body in bodies]


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_what_arrives_while_others_are_kept_is_kept_together_in_order(
    keeper: Keeper, thread: ThreadPoolExecutor
) -> None:
    batcher = WriteBatcher(keeper, thread)
    keeper.gate.clear()
    first = asyncio.create_task(batcher.write(b"0"))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(batcher.write(b"%d" % number)) for number in range(1, 10)]
    await asyncio.sleep(0.01)
    keeper.gate.set()
    assert await asyncio.gather(first, *others) == [b"kept %d" % number for number in range(10)]
    assert keeper.batches == [[b"0"], [b"%d" % number for number in range(1, 10)]]


async def test_a_batch_is_bounded_in_number_and_in_bytes(
    keeper: Keeper, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_batcher, "MAX_BATCH_BODIES", 3)
    monkeypatch.setattr(write_batcher, "MAX_BATCH_BYTES", 10)
    batcher = WriteBatcher(keeper, thread)
    bodies = [b"a", b"b", b"c", b"d", b"123456789", b"12", b"x" * 50, b"y"]
    assert await asyncio.gather(*map(batcher.write, bodies)) == [b"kept " + body for body in bodies]
    assert keeper.batches == [[b"a", b"b", b"c"], [b"d", b"123456789"], [b"12"], [b"x" * 50], [b"y"]]


async def test_what_ends_a_batch_is_told_to_all_of_it_and_the_next_is_kept(
    keeper: Keeper, thread: ThreadPoolExecutor
) -> None:
    batcher = WriteBatcher(keeper, thread)
    results = await asyncio.gather(batcher.write(b"good"), batcher.write(b"all fail"), return_exceptions=True)
    assert [str(result) for result in results] == ["no disk", "no disk"]
    assert await batcher.write(b"next") == b"kept next"


async def test_who_waits_no_more_does_not_disturb_the_others(keeper: Keeper, thread: ThreadPoolExecutor) -> None:
    batcher = WriteBatcher(keeper, thread)
    keeper.gate.clear()
    gone, stays = (asyncio.create_task(batcher.write(body)) for body in (b"gone", b"stays"))
    await asyncio.sleep(0.01)
    gone.cancel()
    keeper.gate.set()
    assert await stays == b"kept stays"
    assert await batcher.write(b"next") == b"kept next"
