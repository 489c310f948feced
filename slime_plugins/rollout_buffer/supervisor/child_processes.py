"""Child processes that end with their parent, and are killed by process id and start time, never by name.

The kernel signals a child when its parent dies. A child that does not react (stopped, or finishing requests) is killed
by the next supervisor, which finds it in ``ChildRecords``. Nothing here needs free disk space: records are overwritten
in place, and a child whose log cannot be opened logs to its parent's.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from slime_plugins.rollout_buffer.observability.process_status import all_process_statuses, boot_id, process_status

PR_SET_PDEATHSIG = 1
RESERVED_BYTES = 65536
TAIL_BYTES = 16384
KILL_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


def free_port() -> int:
    """Returns a port of the loopback interface that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Returns ``count`` different free ports."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A session leader, identified by process id and start time."""

    name: str
    pid: int
    started: int
    """Clock ticks since boot."""
    boot: str

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessIdentity:
        """Identifies a child that was just started."""
        status = process_status(pid)
        return cls(name=name, pid=pid, started=-1 if status is None else status.started, boot=boot_id())

    def members(self) -> list[int]:
        """Returns the live processes of its session, also after its own exit; none if its process id was reused,
        or may have been: after a reboot, or if it exited before it was identified."""
        leader = process_status(self.pid)
        if self.boot != boot_id() or self.started < 0 or (leader is not None and leader.started != self.started):
            return []
        return [pid for pid, status in all_process_statuses() if status.session == self.pid and status.lives]

    def kill(self) -> None:
        """Kills its session and waits up to ``KILL_TIMEOUT_S`` until it is gone."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self.send_kill() and time.monotonic() < deadline:
            time.sleep(0.01)

    def send_kill(self) -> bool:
        """Sends SIGKILL to its session without waiting; returns True if any process was left."""
        left = self.members()
        for pid in left:
            _signal(pid, signal.SIGKILL)
        return bool(left)


class ChildRecords:
    """A file with the children of one supervisor, from which the next supervisor kills those left running."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recorded: list[ProcessIdentity] | None = None
        self._failed: list[ProcessIdentity] | None = None
        """The children that could not be recorded last: the warning is logged once for them."""

    def orphans(self) -> list[ProcessIdentity]:
        """Returns the recorded children; none after an orderly exit or if the file is unreadable."""
        try:
            return [ProcessIdentity(**entry) for entry in json.loads(self._path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OSError) as error:
            logger.warning("%s cannot be read, no orphan is killed: %s", self._path, error)
            return []

    def keep(self, identities: Iterable[ProcessIdentity]) -> None:
        """Replaces the recorded children if they have changed; on a write error logs a warning, and the next call tries
        again.

        Writes in place into reserved blocks, because a full disk has no room for a second file. A power cut may tear
        the file, but it also ends all these processes.
        """
        children = list(identities)
        if children == self._recorded:
            return
        page = json.dumps([asdict(identity) for identity in children]).encode().ljust(RESERVED_BYTES)
        try:
            with open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
                file.write(page)
                file.truncate(len(page))
        except OSError as error:
            if children != self._failed:
                logger.warning("the children cannot be recorded in %s: after a crash they would not be found: %s",
                               self._path, error)  # fmt: skip
            self._failed = children
        else:
            self._recorded = children

    def clear(self) -> None:
        """Records that no child runs; keeps the reserved blocks."""
        self.keep([])


class ChildProcess:
    """A child in a session of its own, with its output in a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_file: Path,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Starts the command; the kernel sends it SIGTERM when this process dies.

        The child inherits ``descriptors`` under their numbers; ``stop_signal`` makes it exit.
        """
        self.name = name
        self._stop_signal = stop_signal
        self.log_file = log_file
        with _open_log(log_file) as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                pass_fds=descriptors,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        self.identity = ProcessIdentity.of(name, self._process.pid)
        logger.info("%s started, process %d, log %s", name, self._process.pid, log_file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._process.poll()

    def is_stopped(self) -> bool:
        """Returns True if it is stopped by SIGSTOP or a debugger."""
        status = process_status(self.pid)
        return status is not None and status.is_stopped

    def send_stop_signal(self) -> None:
        if self.exit_code() is None:
            self._process.send_signal(self._stop_signal)

    def stop(self, timeout_s: float) -> None:
        """Sends the stop signal, waits, and kills its session after ``timeout_s``."""
        self.send_stop_signal()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s (process %d) does not stop: killing it", self.name, self.pid)
            self.kill()

    def kill(self) -> None:
        """Kills every process of its session and reaps it."""
        self.identity.kill()
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("%s (process %d) cannot be killed: it waits in the kernel, perhaps for a disk",
                         self.name, self.pid)  # fmt: skip

    def log_tail(self, lines: int = 5) -> str:
        """Returns the last lines of its log."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def stop_all(processes: Sequence[ChildProcess], timeout_s: float) -> None:
    """Stops processes at the same time; kills those that have not exited after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.send_stop_signal()
    for process in processes:
        process.stop(max(0.0, deadline - time.monotonic()))


def kill_forks_with_parent() -> None:
    """Makes the kernel kill every later fork of this process when the forking thread ends.

    It is for third-party generators that fork workers, such as slime's own. The signal is SIGKILL, because SIGTERM
    would run an inherited handler.
    """
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


def _open_log(path: Path) -> IO[bytes]:
    """Opens a log file to append to; on an error returns this process's own output."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        logger.warning("%s cannot be opened, its lines are logged here: %s", path, error)
        return os.fdopen(os.dup(sys.stderr.fileno()), "wb")


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.debug("process %d was gone already", pid)


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGTERM at the parent's death. May run between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the call
