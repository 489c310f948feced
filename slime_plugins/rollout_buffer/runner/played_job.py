"""The job that a runner plays: its latest record, and its access to the store, through one thread."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.rules.causes import CauseCode, Shortfall
from slime_plugins.rollout_buffer.rules.job_states import FINAL_STATES
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.types import JobState

WATCH_INTERVAL_S = 0.5
STORE_RETRY_S = 2.0

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class FencedError(Exception):
    """Another runner has taken over, or the job is over: this runner stops and writes nothing more."""


class PlayedJob:
    """One job, shared by the parts of its runner. ``record`` is refreshed every ``watch_interval_s``."""

    def __init__(self, buffer: Buffer, job_key: int, plugin: Plugin) -> None:
        self.buffer = buffer
        self.record = buffer.job_by_key(job_key)
        self.key = job_key
        self.settings = buffer.job_settings(self.record)
        self.policy = group_policy(self.record, plugin.reward_range)
        self.fence = 0
        self.watch_interval_s = WATCH_INTERVAL_S
        self.may_play = asyncio.Event()
        """Set while the job is not paused."""
        self.generator_file = plugin.source
        self._plugin = plugin
        self._store_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    @property
    def is_exact(self) -> bool:
        """True if the engine takes and returns token ids; otherwise generations are not stored."""
        return self.settings.engine_api != "openai"

    async def begin(self) -> None:
        """Takes a new fencing number: from now on this is the only runner of the job."""
        takes_items = self._plugin.create_generator is None
        self.fence = await self.call_store(lambda: self.buffer.begin_running(self.key, takes_items=takes_items))
        self._set_pause()
        logger.info("job %s: runner %d begins", self.record.job_id, self.fence)

    def close(self) -> None:
        """Waits for pending calls of the store, and ends its thread."""
        self._store_thread.shutdown(wait=True)

    async def until_over(self, work: Awaitable[None], on_refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Runs ``work`` until it returns, or cancels it when the job is over; calls ``on_refresh`` after each refresh.

        Raises:
            FencedError: another runner has taken over.
        """
        tasks = {asyncio.ensure_future(work), asyncio.ensure_future(self._watch(on_refresh))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _watch(self, on_refresh: Callable[[], Awaitable[None]] | None) -> None:
        while await self.refresh() not in FINAL_STATES:
            if on_refresh is not None:
                await on_refresh()
            await asyncio.sleep(self.watch_interval_s)

    async def refresh(self) -> JobState:
        """Reads the job again and returns its state.

        Raises:
            FencedError: another runner has taken over.
        """
        record = await self.call_store(self.buffer.job_by_key, self.key)
        if record.fence != self.fence:
            raise FencedError
        self.record = record
        self._set_pause()
        return record.state

    def _set_pause(self) -> None:
        if self.record.state is JobState.PAUSED:
            self.may_play.clear()
        else:
            self.may_play.set()

    async def fail(self, cause: str, code: CauseCode = CauseCode.NOT_PLAYED) -> None:
        """Fails the job.

        Raises:
            FencedError: another runner has taken over.
        """
        await self.call_store(lambda: self.buffer.fail_job(self.key, cause[:2000], code, fence=self.fence))

    def judge_and_close(self, record: GroupRecord, shortfall: Shortfall) -> None:
        """Judges a group by its members and closes it; must be called in the store's thread."""
        functions = self._plugin.functions
        verdict = self.buffer.judge_and_close(record, self.policy, functions, shortfall=shortfall, fence=self.fence)
        if verdict is not None:
            group = f"group {record.instance_id} of epoch {record.epoch}"
            logger.info("job %s: %s is %s %s", self.record.job_id, group, verdict.state.value, verdict.cause.message)

    async def call_store(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls the store in its thread, one call at a time; retries while the disk is full or the store is busy.

        Raises:
            FencedError: another runner has taken over.
        """
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        while True:
            try:
                return await loop.run_in_executor(self._store_thread, lambda: context.run(function, *arguments))
            except StaleAttemptError as error:
                raise FencedError(error.message) from error
            except (StorageFullError, UnavailableError) as error:
                logger.error("job %s: %s; retrying", self.record.job_id, error.message)
                await asyncio.sleep(STORE_RETRY_S)
