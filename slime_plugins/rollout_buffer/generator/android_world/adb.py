"""Runs adb commands on one adb server, with short timeouts; errors quote adb's output."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import DeviceError

_COMMAND_TIMEOUT_S = 20.0
_LOCAL = ("127.0.0.1", "localhost")


class AdbServer:
    """The adb server at ``HOST:PORT``; adb starts it if it is on this host and not running."""

    def __init__(self, adb_path: str, address: str) -> None:
        self.host, _, port = address.partition(":")
        self.port = int(port)
        self.host_words = () if self.host in _LOCAL else ("-H", self.host)
        self._command = [adb_path, *self.host_words, "-P", port]

    def run(self, *words: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> tuple[bool, str]:
        """Returns whether the command succeeded, and its output and errors."""
        try:
            done = subprocess.run(
                [*self._command, *words], capture_output=True, timeout=timeout_s, check=False, env=dict(os.environ)
            )
        except subprocess.TimeoutExpired:
            return False, f"no answer within {timeout_s:g} s"
        except OSError as error:
            return False, str(error)
        return done.returncode == 0, (done.stdout + done.stderr).decode("utf-8", "replace").strip()

    def expect(self, words: Sequence[str], *, containing: str = "") -> str:
        """Returns the output of a command that must succeed and must contain ``containing``.

        Raises:
            DeviceError: the command failed or printed something else; the message has adb's output.
        """
        succeeded, said = self.run(*words)
        if not succeeded or containing not in said:
            raise DeviceError(f"adb {' '.join(words)}: {said or 'no answer'}")
        return said

    def states(self) -> dict[str, str]:
        """Returns what ``adb devices`` lists: states by serial."""
        lines = (line.partition("\t") for line in self.expect(["devices"]).splitlines())
        return {serial: state.strip() for serial, tab, state in lines if tab}
