"""Asks other processes whether two expressions are equal, and never waits for ever.

Expressions come from a policy in training: some make a computer algebra system run for hours or eat all memory. So
they are compared in a small process with a memory limit, which ends itself when its time is up and is then replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError

__all__ = ["MathJudge"]

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("judge_process.py")
_START_TIMEOUT_S = 120.0
_GRACE_S = 5.0


class MathJudge:
    """Compares expressions in ``processes`` processes, each within ``timeout_s``."""

    def __init__(self, *, processes: int = 2, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._processes = processes
        self._idle: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._started: set[Process] = set()
        self._ending: set[asyncio.Task[int]] = set()

    async def start(self) -> None:
        """Starts the first process and lets it compare once, so that a missing library shows now.

        Raises:
            ConfigError: math-verify is not installed, or the process does not start.
        """
        for _ in range(self._processes - 1):
            self._idle.put_nowait(None)
        self._idle.put_nowait(await self._launch())

    async def are_equal(self, label: str, answer: str) -> bool:
        """Returns whether ``answer`` is mathematically equal to ``label``; False if that cannot be told in time.

        Raises:
            EnvironmentSetupError: no process can be started any more.
        """
        process = await self._idle.get()
        kept: Process | None = None
        try:
            process = process or await self._launch()
            equal = await self._ask(process, label, answer)
            kept = None if equal is None else process
        except ConfigError as error:
            raise EnvironmentSetupError(f"no judge of math answers: {error.message}") from error
        finally:
            # A process that was given up in the middle would answer the next question with the old answer.
            if kept is None and process is not None:
                self._discard(process)
            self._idle.put_nowait(kept)
        return bool(equal)

    async def close(self) -> None:
        """Ends all processes; a second call does nothing."""
        for process in list(self._started):
            self._discard(process)
        await asyncio.gather(*self._ending)

    async def _launch(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_PROGRAM), f"{self._timeout_s:g}", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        self._started.add(process)
        greeting = await self._read_line(process, _START_TIMEOUT_S)
        if greeting is None or "ready" not in greeting:
            self._discard(process)
            why = (greeting or {}).get("error", "its process does not start")
            raise ConfigError(f'comparing math answers needs math-verify (the "math" extra of this package): {why}')
        return process

    async def _ask(self, process: Process, label: str, answer: str) -> bool | None:
        """Returns the process's verdict, or None if it fell silent or died over the question."""
        if process.stdin is None:
            raise AssertionError("the judge was started without stdin")
        try:
            process.stdin.write(json.dumps({"label": label, "answer": answer}).encode() + b"\n")
            await process.stdin.drain()
        except ConnectionError:
            return None
        verdict = await self._read_line(process, self._timeout_s + _GRACE_S)
        if verdict is None:
            logger.info("two expressions could not be compared within %s s: %r", self._timeout_s, answer)
        return None if verdict is None else bool(verdict.get("equal"))

    async def _read_line(self, process: Process, timeout_s: float) -> dict[str, object] | None:
        if process.stdout is None:
            raise AssertionError("the judge was started without stdout")
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            return None
        return dict(json.loads(line)) if line else None

    def _discard(self, process: Process) -> None:
        self._started.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        ending = asyncio.create_task(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
