"""Runs one emulator for a device worker, and kills it when the worker exits for any reason.

``python watchdog.py RECORDS AVD ADB PORT SERIAL STOP_TIMEOUT_S -- COMMAND``. Its standard input is a pipe from the
worker: when the pipe closes (normal exit, exception, SIGKILL) the watchdog stops the emulator's process group and its
adb server. If the watchdog itself is killed, the kernel kills the emulator.

Each emulator has its own adb server. By default a server connects to every emulator of the host that listens between
ports 5555 and 5585, so this server is started without that search, and the watchdog registers its emulator with it. The
registration is repeated, because android_env restarts the server after any failed command.

The folder RECORDS has one file for each running process (watchdog, emulator, adb server), named ``PID-START`` after
process id and start time in clock ticks, so that a reused id is recognised. ``scripts/cleanup.sh`` reads them. Uses the
standard library only, because it is started by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_POLL_S = 0.5
_ADB_TIMEOUT_S = 10.0
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp
_ADB_SERVER_CHECKS = 2
"""How often it is checked, after the adb server was stopped, that no command has started another one."""


def main(words: list[str]) -> int:
    """Runs the emulator until it exits or the worker is gone; returns the emulator's exit code."""
    folder, avd, adb, port, serial, stop_timeout_s, _, *command = words
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    records = _Records(Path(folder), {"avd": avd, "serial": serial, "adb_port": port, "adb": adb})
    records.end_what_is_left()
    records.add("watchdog", os.getpid())
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=dies_with(os.getpid())
    )
    try:
        records.add("emulator", child.pid)
        _adb(adb, port, "start-server")
        while child.poll() is None and not _is_worker_gone():
            records.add_adb_server(int(port))
            _register_emulator(serial, int(port))
        if child.poll() is None:
            _adb(adb, port, "-s", serial, "emu", "kill")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the cleanup below already does what SIGTERM asks for
        _end(child, float(stop_timeout_s))
        _end_adb_server(adb, port)
        records.clear()
    return child.returncode


class _Records:
    """Record files of the processes started here."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        self._folder = folder
        self._facts = facts | {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "checkout": os.environ.get("ROLLOUT_BUFFER_DEVICE_CHECKOUT", ""),
            "avd_home": os.environ.get("ANDROID_AVD_HOME", ""),
        }
        self._written: list[Path] = []
        self._adb_server: tuple[int, int | None] = (0, None)
        """Process id and start time of the adb server that was recorded last."""

    def end_what_is_left(self) -> None:
        """Removes records of exited processes and ends this device's adb server, left by watchdogs that were killed.

        The device is locked: while its last watchdog lives, there is no next one.
        """
        ours = {f"{key}={self._facts[key]}" for key in ("avd", "avd_home")} | {"kind=adb_server"}
        for path in self._folder.glob("[0-9]*-[0-9]*"):
            pid, _, start = path.name.partition("-")
            with contextlib.suppress(OSError, ValueError):  # it ends just now, or the file is no record
                if _start_of(int(pid)) != int(start):
                    path.unlink()
                elif ours <= set(path.read_text().splitlines()):
                    os.kill(int(pid), signal.SIGTERM)

    def add(self, kind: str, pid: int) -> None:
        start = _start_of(pid)
        if start is None:  # the process has exited
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{pid}-{start}"
        unfinished = self._folder / f".{pid}-{start}"
        unfinished.write_text("".join(f"{key}={value}\n" for key, value in {"kind": kind, **self._facts}.items()))
        unfinished.replace(path)
        self._written.append(path)

    def add_adb_server(self, port: int) -> None:
        """Records the adb server: the process that listens on ``port``. adb starts it some time after the emulator, and
        again whenever android_env has stopped it."""
        pid, start = self._adb_server
        if start is not None and _start_of(pid) == start:
            return
        for listener in _listeners(port):
            if (_start_of(listener) or 0) >= (_start_of(os.getpid()) or 0):
                self.add("adb_server", listener)
                self._adb_server = listener, _start_of(listener)

    def clear(self) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)


def _start_of(pid: int) -> int | None:
    """Returns a process's start time in clock ticks since boot; None if it has exited, also as a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(fields[18])


def _listeners(port: int) -> list[int]:
    """Returns processes of this user that listen on a TCP port of this host."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not wanted:
        return []
    pids = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry.path) in wanted for entry in os.scandir(folder)):
                pids.append(int(folder.parent.name))
        except OSError:  # another user's process, or one that just exited
            continue
    return pids


def _listening_inodes(port: int) -> list[str]:
    """Returns the inodes of the sockets that listen on a TCP port of this host."""
    inodes = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6
            continue
        rows = map(str.split, lines)
        inodes += [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
    return inodes


def dies_with(parent: int) -> Callable[[], None]:
    """Returns a function that a child runs before it starts: the kernel kills the child if its parent is killed."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed before this call
            os._exit(1)

    return before_exec


def _is_worker_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _register_emulator(serial: str, port: int) -> None:
    """Registers the emulator with the adb server on this port, as emulators do when they start; idempotent."""
    console = serial.rpartition("-")[2]
    if not console.isdecimal():
        return
    request = f"host:emulator:{int(console) + 1}"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_POLL_S) as server:
            server.sendall(f"{len(request):04x}{request}".encode())
            server.recv(1)  # the server answers by closing
    except OSError:  # no server, or a busy one: the next call will succeed
        pass


def _adb(adb: str, port: str, *words: str) -> None:
    """Runs an adb command with a short timeout; the emulator is stopped by signal in any case."""
    try:
        subprocess.run([adb, "-P", port, *words], capture_output=True, timeout=_ADB_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"adb {' '.join(words)}: {error}\n")


def _end_adb_server(adb: str, port: str) -> None:
    """Stops the server, and servers that replace it: any adb command in flight starts a new one."""
    _adb(adb, port, "kill-server")
    for _ in range(_ADB_SERVER_CHECKS):
        time.sleep(_POLL_S)
        if _listening_inodes(int(port)):
            _adb(adb, port, "kill-server")


def _end(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Stops the process group: SIGTERM, after ``timeout_s`` SIGKILL. The group is gone on return."""
    for signal_to_send in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, signal_to_send)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + timeout_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
