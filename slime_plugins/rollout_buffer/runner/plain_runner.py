"""Plays a job with a generator in slime's plain form: ``run_rollout(data)``, which writes items over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.observability.tracebacks import place_and_traceback
from slime_plugins.rollout_buffer.rules.causes import Shortfall
from slime_plugins.rollout_buffer.rules.job_states import FINAL_STATES
from slime_plugins.rollout_buffer.runner.group_admission import GROUPS_READ_AHEAD
from slime_plugins.rollout_buffer.runner.played_job import PlayedJob

logger = logging.getLogger(__name__)

RunRollout = Callable[[dict[str, Any]], Any]


class PlainRunner:
    """Runs ``run_rollout`` in a thread and closes groups as their items arrive."""

    def __init__(self, job: PlayedJob, buffer_url: str) -> None:
        """``buffer_url`` is the address that the generator writes to."""
        self._job = job
        self._buffer_url = buffer_url

    async def run(self, run_rollout: RunRollout) -> None:
        """Runs until ``run_rollout`` returns or the job is over; an exception of ``run_rollout`` fails the job.

        When ``run_rollout`` has returned, all groups that are still open are judged and closed.

        Raises:
            FencedError: another runner has taken over.
        """
        job = self._job
        data = await job.call_store(self._data)
        await job.until_over(self._run_and_close(run_rollout, data))
        if await job.refresh() not in FINAL_STATES:
            await job.call_store(self._close_what_is_left)
            await job.call_store(job.buffer.finish_if_done, job.key)

    def _data(self) -> dict[str, Any]:
        job = self._job
        return {
            **job.settings.model_dump(mode="json"),
            "num_process": job.settings.fixed_num_process(),
            "sampling_params": job.settings.plain_sampling_params(),
            "job_id": job.record.job_id,
            "remote_buffer_url": f"{self._buffer_url}/jobs/{quote(job.record.job_id, safe='')}",
            "remote_engine_url": job.record.engine_url,
            "skip_instance_ids": job.buffer.closed_instance_ids(job.key),
        }

    async def _run_and_close(self, run_rollout: RunRollout, data: dict[str, Any]) -> None:
        running = _in_daemon_thread(run_rollout, data)
        while not running.done():
            await asyncio.wait({running}, timeout=self._job.watch_interval_s)
            await self._job.call_store(self._close_groups)
        if (error := running.exception()) is not None:
            logger.error("job %s: run_rollout raised", self._job.record.job_id, exc_info=error)
            await self._job.fail(f"run_rollout raised: {place_and_traceback(error, self._job.generator_file)}")

    def _close_groups(self) -> None:
        job = self._job
        for record, count in job.buffer.open_groups_with_items(job.key):
            if count >= job.record.group_size:
                job.judge_and_close(record, Shortfall.NOT_WRITTEN)
        for record in job.buffer.timed_out_groups(job.record):
            job.judge_and_close(record, Shortfall.TIMED_OUT)

    def _close_what_is_left(self) -> None:
        """Closes all open groups: the generator has returned and will write no more."""
        after = (-1, -1)
        while found := self._job.buffer.open_groups(self._job.key, after=after, limit=GROUPS_READ_AHEAD):
            for record in found:
                after = (record.epoch, record.position)
                self._job.judge_and_close(record, Shortfall.NOT_WRITTEN)


def _in_daemon_thread(function: Callable[[dict[str, Any]], Any], data: dict[str, Any]) -> asyncio.Future[None]:
    """Runs a function in a daemon thread, which does not keep the process of a cancelled job alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def set_outcome(error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(None)

    def work() -> None:
        error: BaseException | None = None
        try:
            function(data)
        except BaseException as raised:  # noqa: BLE001 - the plugin's own code: passed to the waiting caller
            error = raised if isinstance(raised, Exception) else GeneratorError(f"run_rollout ended by {raised!r}")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job was cancelled
            loop.call_soon_threadsafe(set_outcome, error)

    threading.Thread(target=work, name="run_rollout", daemon=True).start()
    return future
