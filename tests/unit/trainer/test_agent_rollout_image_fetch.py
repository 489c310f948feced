"""Screenshots come by their hash: each once, several at a time, and never with wrong bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import cast

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import NotFoundError
from slime_plugins.rollout_buffer.trainer.image_fetch import ImageCache, ImageFetcher
from slime_plugins.rollout_buffer.trainer.job_feed import RetriesUsedUpError


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


A, B, C = b"screen a", b"screen b", b"screen c"
UNKNOWN = name_of(b"never stored")


class ImageShelf:
    """The part of the client that hands out images: counts what is asked for, and fails as it is told."""

    def __init__(self, *images: bytes) -> None:
        self.images = {name_of(data): data for data in images}
        self.asked: Counter[str] = Counter()
        self.failures: dict[str, list[Exception | bytes]] = {}
        self.most_at_once = 0
        self._at_once = 0

    async def get_image(self, sha256: str) -> bytes:
        self.asked[sha256] += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
        finally:
            self._at_once -= 1
        if self.failures.get(sha256):
            failure = self.failures[sha256].pop(0)
            if isinstance(failure, bytes):
                return failure
            raise failure
        if sha256 not in self.images:
            raise NotFoundError(f"there is no image {sha256}")
        return self.images[sha256]


def fetcher(
    shelf: ImageShelf, cache: ImageCache | None = None, at_once: int = 4, max_failures: int | None = 3
) -> ImageFetcher:
    client = cast("AsyncRolloutBufferClient", shelf)
    return ImageFetcher(client, cache or ImageCache(1000), at_once=at_once, max_failures=max_failures)


async def test_each_image_is_asked_for_once_however_often_it_is_wanted() -> None:
    shelf, cache = ImageShelf(A, B), ImageCache(1000)
    wanted = [name_of(A), name_of(B), name_of(A)]

    first = await fetcher(shelf, cache).fetch(wanted)
    again = await fetcher(shelf, cache).fetch(wanted)

    assert dict(first.data) == dict(again.data) == {name_of(A): A, name_of(B): B}
    assert shelf.asked == {name_of(A): 1, name_of(B): 1}


async def test_only_so_many_are_fetched_at_once() -> None:
    shelf = ImageShelf(*(b"screen %d" % number for number in range(40)))

    await fetcher(shelf, at_once=5).fetch(shelf.images)

    assert 2 <= shelf.most_at_once <= 5


async def test_a_passing_failure_is_tried_again() -> None:
    shelf = ImageShelf(A)
    shelf.failures[name_of(A)] = [aiohttp.ClientConnectionError("away"), TimeoutError()]

    assert (await fetcher(shelf).fetch([name_of(A)])).data[name_of(A)] == A


async def test_a_buffer_out_of_reach_ends_the_fetch_and_its_other_requests() -> None:
    shelf = ImageShelf(A, B)
    shelf.failures[name_of(A)] = [aiohttp.ClientConnectionError("away") for _ in range(9)]

    with pytest.raises(RetriesUsedUpError, match="failed 4 times"):
        await fetcher(shelf, at_once=1).fetch([name_of(A), name_of(B)])
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_an_image_that_nobody_has_is_missing_and_hurts_no_other() -> None:
    images = await fetcher(ImageShelf(A)).fetch([UNKNOWN, name_of(A)])

    assert images.missing == {UNKNOWN: f"there is no image {UNKNOWN}"}
    assert dict(images.data) == {name_of(A): A}


async def test_wrong_bytes_are_fetched_anew_and_never_kept() -> None:
    shelf, cache = ImageShelf(A, B), ImageCache(1000)
    shelf.failures[name_of(A)] = [b"screen A"]
    shelf.failures[name_of(B)] = [b"screen X"] * 9

    images = await fetcher(shelf, cache).fetch([name_of(A), name_of(B)])

    assert dict(images.data) == {name_of(A): A}
    assert "do not match its hash" in images.missing[name_of(B)]
    assert shelf.asked == {name_of(A): 2, name_of(B): 3}
    assert cache.get(name_of(B)) is None


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15))))
def test_the_cache_never_holds_more_than_it_may_and_counts_right(limit: int, puts: list[tuple[int, int]]) -> None:
    cache = ImageCache(limit)
    for name, length in puts:
        cache.put(str(name), bytes(length))

    kept = [cache.get(str(name)) for name in range(10)]
    assert sum(len(data) for data in kept if data is not None) == cache._held_bytes <= limit
