"""Fetches screenshots by hash, several at a time, and verifies their bytes.

Fetched images are cached up to a size limit: the members of a group share their first screens, and unchanged screens
repeat. An image that the buffer does not have, or whose bytes do not match its hash, is reported as missing; network
failures are retried as for every other call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import DamagedError, NotFoundError
from slime_plugins.rollout_buffer.trainer.job_feed import with_retries
from slime_plugins.rollout_buffer.types import image_hash

logger = logging.getLogger(__name__)

MAX_DOWNLOADS = 3
"""Downloads of an image whose bytes do not match its hash, before it is reported as missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedImages:
    """Encoded images, or other bytes, by sha256, and the reason why each of the others is missing."""

    data: Mapping[str, bytes] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


class ImageCache:
    """LRU cache of at most ``max_bytes``. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, sha256: str) -> bytes | None:
        """Returns a cached image."""
        with self._lock:
            if sha256 in self._images:
                self._images.move_to_end(sha256)
            return self._images.get(sha256)

    def put(self, sha256: str, data: bytes) -> None:
        """Adds an image; evicts the least recently used ones."""
        with self._lock:
            self._held_bytes += len(data) - len(self._images.pop(sha256, b""))
            self._images[sha256] = data
            self._evict()

    def resize(self, max_bytes: int) -> None:
        """Changes the size limit."""
        with self._lock:
            self._max_bytes = max_bytes
            self._evict()

    def _evict(self) -> None:
        while self._held_bytes > self._max_bytes:
            _, dropped = self._images.popitem(last=False)
            self._held_bytes -= len(dropped)


_process_cache = ImageCache(0)


def process_cache(max_bytes: int) -> ImageCache:
    """Returns the cache of this process, resized to ``max_bytes``."""
    _process_cache.resize(max_bytes)
    return _process_cache


class ImageFetcher:
    """Fetches images, or other bytes by hash, for one rollout. ``fetched`` counts downloads."""

    def __init__(
        self, client: AsyncRolloutBufferClient, cache: ImageCache, *, at_once: int, max_failures: int | None
    ) -> None:
        """``at_once`` limits concurrent requests; ``max_failures`` is as in ``FeedSettings``."""
        self._client = client
        self._cache = cache
        self._gate = asyncio.Semaphore(at_once)
        self._max_failures = max_failures
        self.fetched = 0

    async def fetch(self, hashes: Iterable[str]) -> FetchedImages:
        """Returns the images, from the cache where possible.

        Raises:
            RetriesUsedUpError: calls to the buffer failed for too long.
            RequestError: the buffer refuses a request, other than for a missing image.
        """
        wanted = list(dict.fromkeys(hashes))
        data = {sha256: cached for sha256 in wanted if (cached := self._cache.get(sha256)) is not None}
        missing: dict[str, str] = {}

        async def fetch_one(sha256: str) -> None:
            async with self._gate:
                image_or_reason = await self._download(sha256)
            if isinstance(image_or_reason, str):
                missing[sha256] = image_or_reason
            else:
                data[sha256] = image_or_reason
                self._cache.put(sha256, image_or_reason)

        await _all_or_none([fetch_one(sha256) for sha256 in wanted if sha256 not in data])
        return FetchedImages(data=data, missing=missing)

    async def _download(self, sha256: str) -> bytes | str:
        """Returns the bytes of an image, or the reason why it is missing."""
        for _ in range(MAX_DOWNLOADS):
            answer = await with_retries(f"image {sha256[:12]}", self._max_failures, lambda: self._ask(sha256))
            if isinstance(answer, str):
                return answer
            self.fetched += 1
            if image_hash(answer) == sha256:
                return answer
            logger.warning("the downloaded bytes of image %s do not match its hash", sha256)
        return f"the downloaded bytes of image {sha256[:12]} do not match its hash"

    async def _ask(self, sha256: str) -> bytes | str:
        """Returns what the buffer answers: the bytes, or the reason why it does not have them."""
        try:
            return await self._client.get_image(sha256)
        except (NotFoundError, DamagedError) as error:  # a retry would not help
            return error.message


async def _all_or_none(fetches: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Awaits all fetches; if one fails, cancels the others and raises its error."""
    tasks = [asyncio.create_task(fetch) for fetch in fetches]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
