"""Runs one emulator for a device worker, and ends it when the worker is gone, whatever way it went.

Started as ``python emulator_guard.py ADB PORT SERIAL -- COMMAND``. Its standard input is a pipe whose other end only
the worker holds: when that closes (an orderly end, an exception, SIGKILL) the emulator's whole process group is ended,
and the adb server that belongs to it alone. Uses the standard library only, because it is started by path.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

_POLL_S = 0.5
_PATIENCE_S = 10.0
_ADB_S = 10.0


def main(words: list[str]) -> int:
    """Returns the emulator's exit code."""
    adb, port, serial, _, *command = words
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not _owner_is_gone():
            pass
        if child.poll() is None:
            _adb(adb, port, "-s", serial, "emu", "kill")
    finally:
        _end(child)
        _adb(adb, port, "kill-server")
    return child.returncode


def _leave(*_: object) -> None:
    raise SystemExit(143)


def _owner_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _adb(adb: str, port: str, *words: str) -> None:
    """Asks adb, for a short while; the emulator is ended by signal in any case."""
    try:
        subprocess.run([adb, "-P", port, *words], capture_output=True, timeout=_ADB_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"adb {' '.join(words)}: {error}\n")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process group: first asked, then killed. The group is gone when this returns."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _PATIENCE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
