"""The process of one ``JobRunner``, started by the supervisor: parses arguments, loads the generator, exits with the
job.

On SIGTERM it abandons the running attempts and exits with code 0; the slots stay open.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.generator.registry import Plugin, load, load_file
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat, send_heartbeats
from slime_plugins.rollout_buffer.observability.logs import set_up_logging
from slime_plugins.rollout_buffer.observability.opentelemetry import tracing_from_environment
from slime_plugins.rollout_buffer.observability.tracebacks import place_and_traceback
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.child_processes import kill_forks_with_parent

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one job's runner. Returns 0 also for a job that failed, whose cause is stored."""
    options = _parser().parse_args(arguments)
    set_up_logging()
    buffer = Buffer(Store(options.data_dir, max_bytes=options.max_data_bytes))
    job = buffer.job_by_key(options.job_key)
    try:
        plugin = _plugin(job.task_type, options)
    except GeneratorError as error:
        buffer.fail_job(options.job_key, error.message[:2000])
        return 0
    if plugin.run_rollout is not None:
        kill_forks_with_parent()
    with tracing_from_environment() as tracer:
        runner = JobRunner(
            buffer,
            options.job_key,
            plugin,
            buffer_url=options.buffer_url,
            ray_address=options.ray_address,
            tracer=tracer,
        )
        # Not asyncio.run: closing the loop waits for the generator's threads and for tasks that ignore cancellation.
        asyncio.Runner().run(_run_until_stopped(runner, options.heartbeat_fd))
    buffer.store.close()
    return 0


def _plugin(task_type: str, options: argparse.Namespace) -> Plugin:
    """Loads the generator's file; if there is none, or it no longer has the task type, searches all generator files.

    Raises:
        GeneratorError: the generator's file does not load, or no file has the task type.
    """
    file: Path | None = options.generator_file
    if file is not None and (file.suffix != ".py" or file.is_file()):
        try:
            found = load_file(file, task_type)
        except Exception as error:
            logger.exception("%s does not load", file)
            raise GeneratorError(f"{file.name} does not load: {place_and_traceback(error, file)}") from error
        if found is not None:
            return found
    return load(task_type, options.generator_dir, skip=options.skip_generator)


async def _run_until_stopped(runner: JobRunner, heartbeat_fd: int | None) -> None:
    beats = None if heartbeat_fd is None else asyncio.create_task(send_heartbeats(Heartbeat(heartbeat_fd)))
    work = asyncio.ensure_future(runner.run())
    # Once: a second cancellation would interrupt the cleanup.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: work.cancelling() or work.cancel())
    try:
        await work
    except asyncio.CancelledError:
        logger.info("cancelled (SIGTERM): stopping, open slots stay open")
    finally:
        if beats is not None:
            beats.cancel()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--job-key", type=int, required=True)
    parser.add_argument("--buffer-url", required=True)
    parser.add_argument("--ray-address")
    parser.add_argument("--max-data-bytes", type=int)
    parser.add_argument("--heartbeat-fd", type=int)
    parser.add_argument("--generator-dir", type=Path, action="append", default=[])
    parser.add_argument("--generator-file", type=Path)
    parser.add_argument("--skip-generator", type=Path, action="append", default=[])
    return parser


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # The thread of a plain generator may still run after the job was cancelled.
    os._exit(code)
