"""Asks other processes whether two expressions are equal, and never waits for ever.

Expressions come from a policy in training: some make a computer algebra system run for hours or eat all memory. So
they are compared in a small process with limits of its own. One that uses up its processor time over a question has
answered it: what takes so long is not equal. One that dies in another way (the kernel's out-of-memory killer),
freezes, or finds the machine short of memory has answered nothing: a fresh process is asked. After a few there is no
verdict, and that is an error.
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

logger = logging.getLogger(__name__)

TRIES: Final = 4
"""Processes that are asked one question before there is no verdict."""

_PROGRAM = Path(__file__).with_name("judge_process.py")
_ANSWER_TIMEOUT_S = 120.0
"""Wall-clock limit of a start or an answer, far above what either takes of processor time: only a frozen process, or
one on a machine with dozens of others in line for each processor, is silent for so long."""


class MathJudge:
    """Compares expressions in ``processes`` processes, with ``timeout_s`` of processor time for each question."""

    def __init__(
        self, *, processes: int = 2, timeout_s: float = 5.0, answer_timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> None:
        """``answer_timeout_s`` is by the wall clock; a process that is silent for longer is replaced."""
        self._timeout_s = timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._processes = processes
        self._idle: asyncio.LifoQueue[_JudgeProcess | None] = asyncio.LifoQueue()
        self._started: set[_JudgeProcess] = set()

    async def start(self) -> None:
        """Starts the first process and lets it compare once, so that a missing library shows now.

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
        """Returns whether ``answer`` is mathematically equal to ``label``; False if that takes too much to tell.

        Raises:
            JudgeError: several processes in a row died or fell silent over the question.
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
                # A process that was given up would answer the next question with the old answer.
                await self._end(process)
                process = None
            raise JudgeError(f"the judge of math answers {problem}; {TRIES} processes were asked")
        except asyncio.CancelledError:
            await asyncio.shield(self._end(process))
            process = None
            raise
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Ends all processes; a second call does nothing."""
        await asyncio.gather(*map(self._end, list(self._started)))

    async def _verdict_of(self, process: _JudgeProcess, label: str, answer: str) -> bool:
        """The verdict of one process; its processor time running out is one.

        Raises:
            _NoAnswerError: it died, fell silent, or says that it could not compare.
        """
        verdict = await process.ask({"label": label, "answer": answer}, self._answer_timeout_s)
        if verdict is None and await process.returncode() == -signal.SIGPROF:
            logger.info("two expressions could not be compared within %s s: %r", self._timeout_s, answer)
            return False
        if verdict is None:
            raise _NoAnswerError(f"died over a question (exit status {await process.returncode()})")
        if type(verdict.get("equal")) is not bool:
            raise _NoAnswerError(f"could not compare: {verdict.get('error')}")
        return cast("bool", verdict["equal"])

    async def _launch(self) -> _JudgeProcess:
        """A process that has compared once.

        Raises:
            ConfigError: it lacks math-verify.
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
            greeting = await process.line(self._answer_timeout_s)
        except BaseException:
            await asyncio.shield(self._end(process))
            raise
        if greeting is not None and greeting.get("ready") is True:
            return process
        await self._end(process)
        if greeting is None or "error" not in greeting:
            raise _NoAnswerError("died while it started")
        raise ConfigError(
            f'comparing math answers needs math-verify (the "math" extra of this package): {greeting["error"]}'
        )

    async def _end(self, process: _JudgeProcess | None) -> None:
        if process is not None:
            await process.end()
            self._started.discard(process)


class _NoAnswerError(Exception):
    """A process gave no verdict; another may. Ends in ``MathJudge``."""


class _JudgeProcess(asyncio.SubprocessProtocol):
    """One process: a line goes in, a line comes out. Ended, it has left neither pipe nor zombie."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._read = b""
        self._lines: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._gone: asyncio.Future[None] = loop.create_future()

    @property
    def is_alive(self) -> bool:
        """False once its output has ended or it has exited."""
        return not self._gone.done() and self._transport is not None and self._transport.get_returncode() is None

    async def ask(self, question: dict[str, str], timeout_s: float) -> dict[str, object] | None:
        """Returns its answer; None if it died.

        Raises:
            _NoAnswerError: it fell silent.
        """
        stdin = cast("asyncio.WriteTransport", self._opened().get_pipe_transport(0))
        stdin.write(json.dumps(question).encode() + b"\n")
        return await self.line(timeout_s)

    async def line(self, timeout_s: float) -> dict[str, object] | None:
        """Returns what it says next; None if it died.

        Raises:
            _NoAnswerError: it is silent for ``timeout_s``, or says what is no JSON object.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._lines and not self._gone.done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise _NoAnswerError(f"was silent for {timeout_s:g} s") from error
        if not self._lines:
            return None
        try:
            return dict(json.loads(self._lines.popleft()))
        except (ValueError, TypeError) as error:
            raise _NoAnswerError("says what is no JSON object") from error

    async def returncode(self) -> int | None:
        """Returns how it ended, after its death; a negative number is a signal's."""
        await asyncio.shield(self._gone)
        return self._opened().get_returncode()

    async def end(self) -> None:
        """Kills it, and returns when its pipes are closed; a second call does nothing."""
        self._opened().close()
        await asyncio.shield(self._gone)

    def _opened(self) -> asyncio.SubprocessTransport:
        if self._transport is None:
            raise AssertionError("the process was not started")
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._read = (self._read + data).split(b"\n")
        self._lines.extend(lines)
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        """It has exited and its pipes are closed."""
        if not self._gone.done():
            self._gone.set_result(None)
        self._news.set()
