"""Runs adb commands on one adb server, each with a timeout. Errors quote adb's output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import DeviceError

_COMMAND_TIMEOUT_S = 20.0
_LOCAL_HOSTS = ("127.0.0.1", "localhost")


class AdbServer:
    """The adb server at ``HOST:PORT``. If it is on this host and does not run, adb starts it.

    ``host_words`` are the arguments with which adb reaches a server on another host.
    """

    def __init__(self, adb_path: str, address: str) -> None:
        self.host, _, port = address.partition(":")
        self.port = int(port)
        self.host_words = () if self.host in _LOCAL_HOSTS else ("-H", self.host)
        self._command = [adb_path, *self.host_words, "-P", port]

    def run(self, *words: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> tuple[bool, str]:
        """Runs an adb command; returns whether it succeeded, and what it printed or why it did not run."""
        try:
            result = subprocess.run([*self._command, *words], capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return False, f"no answer within {timeout_s:g} s"
        except OSError as error:
            return False, str(error)
        return result.returncode == 0, (result.stdout + result.stderr).decode("utf-8", "replace").strip()

    def expect(self, words: Sequence[str], *, containing: str = "") -> str:
        """Returns the output of a command that must succeed, with ``containing`` in its output.

        Raises:
            DeviceError: the command failed or printed something else; the message has adb's output.
        """
        succeeded, output = self.run(*words)
        if not succeeded or containing not in output:
            raise DeviceError(f"adb {' '.join(words)}: {output or 'no answer'}")
        return output

    def states(self) -> dict[str, str]:
        """Returns the state of each device that ``adb devices`` lists, by serial.

        Raises:
            DeviceError: the server does not answer.
        """
        lines = (line.partition("\t") for line in self.expect(["devices"]).splitlines())
        return {serial: state.strip() for serial, tab, state in lines if tab}
