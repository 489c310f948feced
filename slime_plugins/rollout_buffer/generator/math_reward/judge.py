"""Compares expressions in subprocesses, with limits of time and memory.

A policy in training writes expressions that make a computer algebra system run for hours or use all memory. So they are
compared in a small process with limits. If it exceeds its CPU time, the expressions count as different. If it crashes
in another way (the kernel's out-of-memory killer), hangs, or the machine is short of memory, there is no verdict: a new
process retries. After ``TRIES`` an error is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Final, cast

from slime_plugins.rollout_buffer.errors import ConfigError, JudgeError

logger = logging.getLogger(__name__)

TRIES: Final = 4
"""Maximum number of processes for one comparison."""

_PROGRAM = Path(__file__).with_name("judge_process.py")
_ANSWER_TIMEOUT_S = 120.0
"""Wall-clock limit of a start or an answer, far above the CPU time of either: only a hung process, or one on a machine
with dozens of runnable processes per CPU, exceeds it."""


class MathJudge:
    """Compares expressions in ``processes`` processes, with ``timeout_s`` of CPU time for each comparison."""

    def __init__(
        self, *, processes: int = 2, timeout_s: float = 5.0, answer_timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> None:
        """``answer_timeout_s`` is wall-clock time; a process that exceeds it is replaced."""
        self._timeout_s = timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._processes = processes
        self._idle: asyncio.LifoQueue[_JudgeProcess | None] = asyncio.LifoQueue()
        self._started: set[_JudgeProcess] = set()

    async def start(self) -> None:
        """Starts the first process and runs one comparison, so that a missing library is found now.

        Raises:
            ConfigError: math-verify is not installed, or several processes in a row did not start.
        """
        for _ in range(self._processes - 1):
            self._idle.put_nowait(None)
        for tried in range(1, TRIES + 1):
            try:
                self._idle.put_nowait(await self._launch())
                return
            except _NoAnswerError as error:
                logger.warning("the judge of math answers %s (try %d of %d)", error, tried, TRIES)
                problem = str(error)
        raise ConfigError(f"the process that compares math answers does not start: it {problem}")

    async def are_equal(self, label: str, answer: str) -> bool:
        """Returns True if ``answer`` is mathematically equal to ``label``; False also after the limit of CPU time.

        Raises:
            JudgeError: several processes in a row crashed or hung.
        """
        process = await self._idle.get()
        try:
            for tried in range(1, TRIES + 1):
                try:
                    process = process if process is not None and process.is_alive else await self._launch()
                    return await self._verdict_of(process, label, answer)
                except _NoAnswerError as error:
                    logger.warning("the judge of math answers %s (try %d of %d)", error, tried, TRIES)
                    problem = str(error)
                # An abandoned process would answer the next comparison with the old result.
                await self._end(process)
                process = None
            raise JudgeError(f"the judge of math answers {problem}; {TRIES} processes were tried")
        except asyncio.CancelledError:
            await asyncio.shield(self._end(process))
            process = None
            raise
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Kills all processes; a second call does nothing."""
        await asyncio.gather(*map(self._end, list(self._started)))

    async def _verdict_of(self, process: _JudgeProcess, label: str, answer: str) -> bool:
        """Returns the verdict of one process; exceeding its CPU time is a verdict.

        Raises:
            _NoAnswerError: it crashed, hung, or reported an error.
        """
        verdict = await process.ask({"label": label, "answer": answer}, self._answer_timeout_s)
        if verdict is None and await process.returncode() == -signal.SIGPROF:
            logger.info("two expressions could not be compared within %s s: %r", self._timeout_s, answer)
            return False
        if verdict is None:
            raise _NoAnswerError(f"crashed during a comparison (exit status {await process.returncode()})")
        if type(verdict.get("equal")) is not bool:
            raise _NoAnswerError(f"could not compare: {verdict.get('error')}")
        return cast("bool", verdict["equal"])

    async def _launch(self) -> _JudgeProcess:
        """Starts a process and runs one comparison in it.

        Raises:
            ConfigError: math-verify is missing.
            _NoAnswerError: it does not start.
        """
        command = (sys.executable, "-P", str(_PROGRAM), f"{self._timeout_s:g}")
        try:
            started = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        except OSError as error:
            raise _NoAnswerError(f"cannot be started ({error})") from error
        process = _JudgeProcess(started)
        self._started.add(process)
        try:
            greeting = await process.line(self._answer_timeout_s)
        except BaseException:
            await asyncio.shield(self._end(process))
            raise
        if greeting is not None and greeting.get("ready") is True:
            return process
        await self._end(process)
        if greeting is None or "error" not in greeting:
            raise _NoAnswerError("crashed during its start")
        raise ConfigError(
            f'comparing math answers needs math-verify (the "math" extra of this package): {greeting["error"]}'
        )

    async def _end(self, process: _JudgeProcess | None) -> None:
        if process is not None:
            await process.end()
            self._started.discard(process)


class _NoAnswerError(Exception):
    """A process gave no verdict; another may. Handled in ``MathJudge``."""


class _JudgeProcess:
    """One process: JSON lines in and out. After ``end`` neither pipes nor a zombie remain."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._questions = cast("asyncio.StreamWriter", process.stdin)
        self._answers = cast("asyncio.StreamReader", process.stdout)

    @property
    def is_alive(self) -> bool:
        """False once its output has closed or it has exited."""
        return self._process.returncode is None and not self._answers.at_eof()

    async def ask(self, question: dict[str, str], timeout_s: float) -> dict[str, object] | None:
        """Returns the answer; None if the process crashed.

        Raises:
            _NoAnswerError: it hung.
        """
        self._questions.write(json.dumps(question).encode() + b"\n")
        return await self.line(timeout_s)

    async def line(self, timeout_s: float) -> dict[str, object] | None:
        """Returns the next line; None if the process crashed.

        Raises:
            _NoAnswerError: no line within ``timeout_s``, or one that is no JSON object.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._answers.readline()
        except TimeoutError as error:
            raise _NoAnswerError(f"did not answer within {timeout_s:g} s") from error
        if not line.endswith(b"\n"):
            return None
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise _NoAnswerError("wrote a line that is no JSON object") from error

    async def returncode(self) -> int:
        """Returns its exit status; a negative number is a signal's."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kills it and waits for its end; a second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._questions.close()
        await asyncio.shield(self._process.wait())
