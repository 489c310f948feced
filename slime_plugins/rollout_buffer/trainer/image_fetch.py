"""Screenshots by their hash: fetched several at a time, each once per process, taken only if their bytes hash right.

What was fetched stays in a cache of bounded size: the members of a group share their first screens, and a screen on
which nothing happened comes again. A screenshot that the buffer does not have, or whose bytes stay wrong, is named as
missing, for whoever wanted it to say so; a buffer that is out of reach is tried again as for every other call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import DamagedError, NotFoundError
from slime_plugins.rollout_buffer.trainer.job_feed import with_retries

logger = logging.getLogger(__name__)

TRIES_OF_A_DAMAGED_IMAGE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedImages:
    """Encoded images by sha256, and for each that could not be had, why."""

    data: Mapping[str, bytes] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


class ImageCache:
    """Keeps the bytes used last, at most ``max_bytes`` of them. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """What is kept at present."""
        return self._held_bytes

    def get(self, sha256: str) -> bytes | None:
        """Returns the bytes, None when they are not kept."""
        with self._lock:
            if sha256 in self._images:
                self._images.move_to_end(sha256)
            return self._images.get(sha256)

    def put(self, sha256: str, data: bytes) -> None:
        """Keeps the bytes; what was not used for longest makes room."""
        with self._lock:
            self._held_bytes += len(data) - len(self._images.pop(sha256, b""))
            self._images[sha256] = data
            self._make_room()

    def resize(self, max_bytes: int) -> None:
        """Changes how much is kept."""
        with self._lock:
            self._max_bytes = max_bytes
            self._make_room()

    def _make_room(self) -> None:
        while self._held_bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self._held_bytes -= len(dropped)


_process_cache = ImageCache(0)


def process_cache(max_bytes: int) -> ImageCache:
    """Returns the one cache of this process, holding at most ``max_bytes`` from now on."""
    _process_cache.resize(max_bytes)
    return _process_cache


class ImageFetcher:
    """Fetches for one rollout. ``fetched`` counts the images that came over the network."""

    def __init__(
        self, client: AsyncRolloutBufferClient, cache: ImageCache, *, at_once: int, max_failures: int | None
    ) -> None:
        """At most ``at_once`` requests are under way; ``max_failures`` in a row of one tolerated; None: 15 min."""
        self._client = client
        self._cache = cache
        self._gate = asyncio.Semaphore(at_once)
        self._max_failures = max_failures
        self.fetched = 0

    async def fetch(self, hashes: Iterable[str]) -> FetchedImages:
        """Returns the images, whatever the cache still holds of them without asking.

        Raises:
            RetriesUsedUpError: the buffer stayed out of reach.
            RequestError: the buffer refuses the request for another reason than that it has no such image.
        """
        wanted = list(dict.fromkeys(hashes))
        data = {sha256: kept for sha256 in wanted if (kept := self._cache.get(sha256)) is not None}
        missing: dict[str, str] = {}

        async def one(sha256: str) -> None:
            async with self._gate:
                found = await self._download(sha256)
            if isinstance(found, str):
                missing[sha256] = found
            else:
                data[sha256] = found
                self._cache.put(sha256, found)

        await _all_or_none([one(sha256) for sha256 in wanted if sha256 not in data])
        return FetchedImages(data=data, missing=missing)

    async def _download(self, sha256: str) -> bytes | str:
        """Returns the bytes that hash to ``sha256``, or why there are none."""
        for _ in range(TRIES_OF_A_DAMAGED_IMAGE):
            found = await with_retries(f"image {sha256[:12]}", self._max_failures, lambda: self._ask(sha256))
            if isinstance(found, str):
                return found
            self.fetched += 1
            if hashlib.sha256(found).hexdigest() == sha256:
                return found
            logger.warning("image %s came with other bytes than its name says", sha256)
        return f"the buffer's image {sha256[:12]} has other bytes than its name says"

    async def _ask(self, sha256: str) -> bytes | str:
        try:
            return await self._client.get_image(sha256)
        except (NotFoundError, DamagedError) as error:  # asking again would not bring it back
            return error.message


async def _all_or_none(fetches: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Awaits all; when one fails, the others are cancelled before its error goes on."""
    tasks = [asyncio.create_task(fetch) for fetch in fetches]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
