"""Child processes that never outlive their parent and are ended by id, never by name."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["ChildProcess"]

PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


class ChildProcess:
    """One child in a process group of its own, with its output in a log file."""

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
                preexec_fn=_die_with_parent,
            )
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
        """Asks it to stop, waits, and after ``patience_s`` kills its process group."""
        self.ask_to_stop()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s (process %d) does not stop: killing it", self.name, self.pid)
            self.kill()

    def kill(self) -> None:
        """Kills its whole process group and collects it."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("%s (process %d) was gone already", self.name, self.pid)
        self._process.wait()

    def last_words(self, lines: int = 5) -> str:
        """Returns the last lines of its log, for messages."""
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def _die_with_parent() -> None:
    """Runs in the child between fork and exec: asks the kernel for SIGTERM at the parent's death."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
