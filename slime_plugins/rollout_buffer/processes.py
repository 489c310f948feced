"""Child processes that never outlive their parent for long, and are ended by id and start time, never by name.

The kernel tells a child when its parent dies. A child that cannot hear it (stopped, or waiting for its last requests)
is ended by the parent's successor, which reads in ``ChildRecords`` what was left running.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["ChildProcess", "ChildRecords", "ProcessMark", "kill_forks_with_parent"]

PR_SET_PDEATHSIG = 1
KILL_PATIENCE_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMark:
    """A process that leads a session, told from a later one with the same id by when it started."""

    name: str
    pid: int
    started: int
    """Clock ticks since boot."""
    boot: str

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessMark:
        """Marks a child that was just started."""
        found = _status(pid)
        return cls(name=name, pid=pid, started=-1 if found is None else found.started, boot=_boot())

    def members(self) -> list[int]:
        """Returns the processes of its session that live, also after its own death; none when the id means another."""
        leader = _status(self.pid)
        if self.boot != _boot() or self.started < 0 or (leader is not None and leader.started != self.started):
            return []
        return [pid for pid, status in _all_statuses() if status.session == self.pid and status.lives]

    def kill(self) -> None:
        """Kills its whole session and waits until it is gone."""
        deadline = time.monotonic() + KILL_PATIENCE_S
        while (left := self.members()) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.01)


class ChildRecords:
    """The children of one parent on disk, so that its successor can end exactly those that it left running."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def left_behind(self) -> list[ProcessMark]:
        """Returns the recorded children; none after an orderly end. What cannot be read counts as none."""
        try:
            return [ProcessMark(**entry) for entry in json.loads(self._path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OSError) as error:
            logger.warning("%s cannot be read, nothing is ended by it: %s", self._path, error)
            return []

    def keep(self, marks: Iterable[ProcessMark]) -> None:
        """Records these children and no others."""
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(mark) for mark in marks]), encoding="utf-8")
        partial.replace(self._path)

    def forget(self) -> None:
        """Says that all of them were ended."""
        self._path.unlink(missing_ok=True)


class ChildProcess:
    """One child in a session of its own, with its output in a log file."""

    def __init__(
        self, name: str, command: Sequence[str], *, log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts the command; the kernel sends it SIGTERM when this process dies, however it dies."""
        self.name = name
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )
        self.mark = ProcessMark.of(name, self._process.pid)
        logger.info("%s started, process %d, log %s", name, self._process.pid, log_file)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, if it still runs."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self, patience_s: float) -> None:
        """Asks it to stop, waits, and after ``patience_s`` kills its session."""
        self.ask_to_stop()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s (process %d) does not stop: killing it", self.name, self.pid)
            self.kill()

    def kill(self) -> None:
        """Kills it with everything it started in its session, also what outlived it, and collects it."""
        self.mark.kill()
        self._process.wait()

    def last_words(self, lines: int = 5) -> str:
        """Returns the last lines of its log, for messages."""
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def kill_forks_with_parent() -> None:
    """From now on the kernel kills what this process forks as soon as the thread that forked it ends, however it ends.

    For generators of others that fork workers, as slime's own does. SIGTERM would run a handler that was inherited.
    """
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


@dataclass(frozen=True, slots=True)
class _Status:
    """What the kernel says of a process."""

    session: int
    started: int
    lives: bool


def _status(pid: int) -> _Status | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return _Status(session=int(fields[3]), started=int(fields[19]), lives=fields[0] not in "ZX")


def _all_statuses() -> list[tuple[int, _Status]]:
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [(pid, status) for pid in pids if (status := _status(pid)) is not None]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("process %d was gone already", pid)


def _die_with_parent(parent: int) -> None:
    """Runs in the child between fork and exec: asks the kernel for SIGTERM at the parent's death."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked
