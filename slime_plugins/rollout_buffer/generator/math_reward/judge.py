"""Starts and asks the processes that compare expressions; the comparison itself is in ``judge_process.py``.

A policy in training writes expressions that make a computer algebra system run for hours or use all memory. So they are
compared in a small process with limits of time and memory. If the process exceeds its CPU time, the expressions count
as different. If it crashes in another way (as by the kernel's out-of-memory killer), if it hangs, or if the machine is
short of memory, there is no verdict, and a new process tries again. After ``TRIES`` processes an error is raised.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from pathlib import Path
from typing import Final, cast

from slime_plugins.rollout_buffer.errors import ConfigError, JudgeError
from slime_plugins.rollout_buffer.install_hints import install_extra

logger = logging.getLogger(__name__)

TRIES: Final = 4
"""Maximum number of processes for one comparison."""

_PROGRAM = Path(__file__).with_name("judge_process.py")
_ANSWER_TIMEOUT_S = 120.0
"""Wall-clock limit of a start or an answer, far above the CPU time of either: only a hung process, or one on a machine
with dozens of runnable processes per CPU, exceeds it."""


class MathJudge:
    """Compares expressions in ``processes`` processes, with ``timeout_s`` of CPU time for each comparison."""

    def __init__(self, *, processes: int = 2, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._processes = processes
        self._idle: asyncio.LifoQueue[_JudgeProcess | None] = asyncio.LifoQueue()
        self._started: set[_JudgeProcess] = set()

    async def start(self) -> None:
        """Starts the first process and runs one comparison, so that a missing library is found now.

        Raises:
            ConfigError: math-verify is not installed.
            JudgeError: several processes in a row did not start.
        """
        for _ in range(self._processes):
            self._idle.put_nowait(None)  # None stands for a process that is started when a comparison needs it
        await self.are_equal("4", "4")

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
        """Returns the verdict of one process; a process that exceeds its CPU time has given the verdict False.

        Raises:
            _NoAnswerError: the process crashed, hung, or reported an error.
        """
        verdict = await process.ask({"label": label, "answer": answer}, _ANSWER_TIMEOUT_S)
        if verdict is None and await process.returncode() == -signal.SIGPROF:
            logger.info("two expressions could not be compared within %s s of CPU time: %r", self._timeout_s, answer)
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
        loop = asyncio.get_running_loop()
        command = (sys.executable, "-P", str(_PROGRAM), f"{self._timeout_s:g}")
        try:
            _, process = await loop.subprocess_exec(_JudgeProcess, *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        except OSError as error:
            raise _NoAnswerError(f"cannot be started ({error})") from error
        self._started.add(process)
        try:
            greeting = await process.line(_ANSWER_TIMEOUT_S)
        except BaseException:
            await asyncio.shield(self._end(process))
            raise
        if greeting is not None and greeting.get("ready") is True:
            return process
        await self._end(process)
        if greeting is None or "error" not in greeting:
            raise _NoAnswerError("crashed during its start")
        raise ConfigError(f"comparing answers needs math-verify ({greeting['error']}): {install_extra('math')}")

    async def _end(self, process: _JudgeProcess | None) -> None:
        if process is not None:
            await process.end()
            self._started.discard(process)


class _NoAnswerError(Exception):
    """A process gave no verdict; ``MathJudge`` asks another process."""


class _JudgeProcess(asyncio.SubprocessProtocol):
    """One process that reads and writes JSON lines. After ``end`` neither its pipes nor a zombie remain."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._unfinished_line = b""
        self._lines: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._gone: asyncio.Future[None] = loop.create_future()

    @property
    def is_alive(self) -> bool:
        """False before the process has started, and once it has exited."""
        return not self._gone.done() and self._transport is not None and self._transport.get_returncode() is None

    async def ask(self, question: dict[str, str], timeout_s: float) -> dict[str, object] | None:
        """Returns the answer; None if the process crashed.

        Raises:
            _NoAnswerError: as ``line``.
        """
        stdin = cast("asyncio.WriteTransport", self._opened().get_pipe_transport(0))
        stdin.write(json.dumps(question).encode() + b"\n")
        return await self.line(timeout_s)

    async def line(self, timeout_s: float) -> dict[str, object] | None:
        """Returns the next line; None if the process crashed.

        Raises:
            _NoAnswerError: no line within ``timeout_s``, or one that is no JSON object.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._lines and not self._gone.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise _NoAnswerError(f"did not answer within {timeout_s:g} s") from error
        if not self._lines:
            return None
        try:
            return dict(json.loads(self._lines.popleft()))
        except (ValueError, TypeError) as error:
            raise _NoAnswerError("wrote a line that is no JSON object") from error

    async def returncode(self) -> int | None:
        """Returns its exit status; a negative number is a signal's."""
        await asyncio.shield(self._gone)
        return self._opened().get_returncode()

    async def end(self) -> None:
        """Kills it and waits for its pipes to close; a second call does nothing."""
        self._opened().close()
        await asyncio.shield(self._gone)

    def _opened(self) -> asyncio.SubprocessTransport:
        if self._transport is None:
            raise AssertionError("the process was not started")
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        self._lines.extend(lines)
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The process has exited and its pipes are closed."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._changed.set()
