"""Deliveries become groups of rows beside the event loop, with their screenshots where the model takes images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.trainer.image_fetch import ImageCache, ImageFetcher, process_cache
from slime_plugins.rollout_buffer.trainer.records import RolloutGroup
from slime_plugins.rollout_buffer.trainer.rows import RowBuilder, images_of
from slime_plugins.rollout_buffer.trainer.settings import ImageSettings, RowSettings
from slime_plugins.rollout_buffer.trainer.vision import VisionFamily, load_vision
from slime_plugins.rollout_buffer.wire import RolloutItem

__all__ = ["Intake"]


class Intake:
    """Turns the items of deliveries into groups. ``images`` None leaves screenshots out of the rows."""

    def __init__(
        self,
        client: AsyncRolloutBufferClient,
        rows: RowSettings,
        images: ImageSettings | None,
        *,
        max_failures: int | None,
    ) -> None:
        self._checkpoint = rows.masks.tokenizer_path
        self._image_settings = images
        self._rows = RowBuilder(rows)
        settings = images or ImageSettings()
        self.images = ImageFetcher(
            client,
            process_cache(settings.cache_bytes),
            at_once=settings.fetches_at_once,
            max_failures=max_failures,
        )
        # Each is needed by one trajectory alone: keeping them would only push screenshots out.
        self._records = ImageFetcher(client, ImageCache(0), at_once=settings.fetches_at_once, max_failures=max_failures)
        self._record_kinds = rows.records
        self.counts = self._rows.counts

    async def groups(self, items: Sequence[RolloutItem], *, trainer_version: int | None = None) -> list[RolloutGroup]:
        """Returns the groups of one delivery. The work is done in a thread: images are large.

        ``trainer_version`` is that of the weights that train them, as ``RowBuilder.groups`` takes it.

        Raises:
            RetriesUsedUpError: a screenshot or token records could not be fetched: the buffer stayed out of reach.
            ConfigError: the model's image processor is of a family that is not known.
        """
        hashes = [sha256 for item in items if not item.remove_sample for sha256 in images_of(item)]
        vision = await self._vision() if hashes else None
        images = None if vision is None else await self.images.fetch(hashes)
        named = [
            one.records[kind].sha256
            for item in items
            if not item.remove_sample
            for one in item.generations
            for kind in self._record_kinds
            if kind in one.records
        ]
        records = await self._records.fetch(named) if named else None
        return await asyncio.to_thread(
            self._rows.groups, items, vision, images, trainer_version=trainer_version, records=records
        )

    async def _vision(self) -> VisionFamily | None:
        if self._image_settings is None or self._checkpoint is None:
            return None
        return await asyncio.to_thread(load_vision, self._checkpoint, self._image_settings.pixel_dtype)
