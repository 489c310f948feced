"""Converts deliveries into groups of rows, in a thread.

Rows get the tensors of their screenshots if the model takes images. Before tensors are made that do not fit the
available memory, a ``ConfigError`` is raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutGroup
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages, ImageCache, ImageFetcher, process_cache
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder, images_of, images_of_rows
from slime_plugins.rollout_buffer.trainer.settings import ImageSettings, RowSettings
from slime_plugins.rollout_buffer.trainer.vision import VisionFamily, load_vision, tensor_bytes
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


class DeliveryConverter:
    """Converts the items of deliveries into groups. With ``images`` None, rows get no tensors of screenshots."""

    def __init__(
        self,
        client: AsyncRolloutBufferClient,
        rows: RowSettings,
        images: ImageSettings | None,
        *,
        max_failures: int | None,
        trajectories: int | None = None,
    ) -> None:
        """``trajectories`` is the size of a batch. If it is given, a warning is logged if a batch does not fit the
        available memory, estimated once from the first delivery with images.
        """
        self._checkpoint = rows.masks.tokenizer_path
        self._image_settings = images
        self._rows = RowBuilder(rows)
        settings = images or ImageSettings()
        self.images = ImageFetcher(
            client, process_cache(settings.cache_bytes), at_once=settings.fetches_at_once, max_failures=max_failures
        )
        # Not cached: each token record belongs to one trajectory only.
        self._records = ImageFetcher(client, ImageCache(0), at_once=settings.fetches_at_once, max_failures=max_failures)
        self._record_kinds = rows.records
        self.counts = self._rows.counts
        self._trajectories = trajectories

    async def load_vision(self) -> None:
        """Loads the model's image processor, before episodes are played.

        Raises:
            ConfigError: the processor of a vision model cannot be loaded, or its family is not supported.
        """
        await self._vision()

    async def groups(self, items: Sequence[RolloutItem], *, trainer_version: int | None = None) -> list[RolloutGroup]:
        """Returns the groups of one delivery, converted in a thread because images are large.

        ``trainer_version`` is the trainer's weight version, as in ``RowBuilder.groups``.

        Raises:
            RetriesUsedUpError: calls to the buffer for screenshots or token records failed for too long.
            ConfigError: as ``load_vision``; or the tensors of the screenshots do not fit the available memory.
        """
        hashes = [sha256 for item in items if not item.remove_sample for sha256 in images_of(item)]
        vision, images, threads = await self._vision() if hashes else None, None, 1
        if vision is not None and self._image_settings is not None:
            images, threads = await self.images.fetch(hashes), self._image_settings.threads
            await asyncio.to_thread(self._check_memory, items, vision, images)
        record_hashes = [
            generation.records[kind].sha256
            for item in items
            if not item.remove_sample
            for generation in item.generations
            for kind in self._record_kinds
            if kind in generation.records
        ]
        records = await self._records.fetch(record_hashes) if record_hashes else None
        return await asyncio.to_thread(
            self._rows.groups,
            items,
            vision,
            images,
            trainer_version=trainer_version,
            records=records,
            image_threads=threads,
        )

    def _check_memory(self, items: Sequence[RolloutItem], vision: VisionFamily, images: FetchedImages) -> None:
        """Estimates the size of the tensors before they are made, from one image and the areas of the others.

        Raises:
            ConfigError: the tensors of this delivery do not fit the available memory.
        """
        available = available_bytes()
        played = [item for item in items if not item.remove_sample]
        shown = [sha256 for item in played for sha256 in images_of_rows(item)]
        needed = tensor_bytes(vision, shown, images)
        if available is None or not needed:
            return
        about = f"{len(shown)} screenshots of {len(played)} trajectories become {needed / 1e9:.1f} GB of tensors"
        advice = (
            "bfloat16 pixels (rollout_buffer_pixel_dtype) halve them; or fewer trajectories, or smaller screenshots"
        )
        if needed > available:
            raise ConfigError(f"{about}, and {available / 1e9:.1f} GB of memory are left: {advice}")
        whole = needed / len(played) * max(self._trajectories or 0, len(played))
        if self._trajectories is not None and whole > available:
            logger.warning(
                "%s, and the whole batch about %.1f GB, of which %.1f GB are left: %s",
                about,
                whole / 1e9,
                available / 1e9,
                advice,
            )
        self._trajectories = None

    async def _vision(self) -> VisionFamily | None:
        if self._image_settings is None or self._checkpoint is None:
            return None
        return await asyncio.to_thread(load_vision, self._checkpoint, self._image_settings.pixel_dtype)


def available_bytes(meminfo: Path = MEMINFO, control_group: Path = CONTROL_GROUP) -> int | None:
    """Returns the bytes available without swapping, the lower of machine and control group; None if unknown."""
    known = [size for size in (_of_machine(meminfo), _of_control_group(control_group)) if size is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    kilobytes = _fields(meminfo).get("MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_control_group(folder: Path) -> int | None:
    """Returns the control group's limit minus its usage; reclaimable page cache does not count as usage."""
    limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return None
    return max(0, limit - used + _fields(folder / "memory.stat").get("inactive_file", 0))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" means that there is no limit
        return None


def _fields(file: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
