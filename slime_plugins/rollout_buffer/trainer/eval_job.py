"""Runs an evaluation for a trainer: a separate job that is played once, with all its groups fetched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutGroup
from slime_plugins.rollout_buffer.trainer.delivery_conversion import DeliveryConverter
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError, JobFeed, send_start, with_retries
from slime_plugins.rollout_buffer.trainer.settings import FeedSettings, RowSettings


async def play_once(
    client: AsyncRolloutBufferClient, settings: FeedSettings, payload: Mapping[str, Any], rows: RowSettings
) -> tuple[list[RolloutGroup], int]:
    """Runs the job of ``payload`` until it has finished, and returns its delivered groups and its number of slots.

    The groups have no tensors of screenshots; failed groups are not among them. After an error the job is cancelled, to
    free its devices and the engine.

    Raises:
        JobEndedError, RetriesUsedUpError, RequestError: as ``JobFeed.next_delivery`` and ``send_start``.
    """
    job_id = payload["job_id"]
    await asyncio.to_thread(send_start, settings, payload)
    converter = DeliveryConverter(client, rows, None, max_failures=settings.max_failures)
    try:
        groups = await _all_groups(JobFeed(client, settings, job_id), converter)
        job = await with_retries("jobs", settings.max_failures, lambda: client.job(job_id))
    except Exception:
        with contextlib.suppress(Exception):
            await client.cancel(job_id)
        raise
    return groups, sum(job["groups"].values()) * rows.samples_per_group


async def _all_groups(feed: JobFeed, converter: DeliveryConverter) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    while True:
        try:
            delivery = await feed.next_delivery()
        except InputExhaustedError:
            return groups
        groups += await converter.groups(delivery.items)
        feed.received(delivery)
