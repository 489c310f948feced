"""Runs one emulator for a device worker, and ends it when the worker is gone, whatever way it went.

``python watchdog.py RECORDS AVD ADB PORT SERIAL STOP_TIMEOUT_S -- COMMAND``. Its standard input is a pipe whose
other end only the worker holds: when that closes (an orderly end, an exception, SIGKILL) the emulator's whole process
group is ended, and the adb server that belongs to it alone. If the watchdog itself is killed, the kernel kills the
emulator.

The adb server knows this emulator and no other: by itself it would adopt every emulator of the host that listens
between 5555 and 5585, so it is started without that search, and told of its own. Again and again, because whoever
restarts the server (android_env does, after any command that failed) restarts one that knows nobody.

What runs is on record: one file in the folder RECORDS for the watchdog, the emulator and its adb server, named
``PID-START`` after the process and the clock tick it started at, so that an id that means another process by now is
never mistaken for it. ``scripts/cleanup.sh`` reads them. Uses the standard library only, because it is started by path.
"""

from __future__ import annotations

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
_ADB_S = 10.0
_SET_PARENT_DEATH_SIGNAL = 1
_LISTENING = "0A"
_LAST_LOOKS = 2


def main(words: list[str]) -> int:
    """Returns the emulator's exit code."""
    folder, avd, adb, port, serial, stop_timeout_s, _, *command = words
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    records = _Records(Path(folder), {"avd": avd, "serial": serial, "adb_port": port, "adb": adb})
    records.drop_ended()
    records.add("watchdog", os.getpid())
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_dies_with(os.getpid())
    )
    try:
        records.add("emulator", child.pid)
        _adb(adb, port, "start-server")
        while child.poll() is None and not _owner_is_gone():
            records.add_adb_server(int(port))
            _introduce(serial, int(port))
        if child.poll() is None:
            _adb(adb, port, "-s", serial, "emu", "kill")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left to do is what it asks for
        _end(child, float(stop_timeout_s))
        _end_adb_server(adb, port)
        records.clear()
    return child.returncode


class _Records:
    """The files that say which processes were started here."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        self._folder = folder
        self._facts = facts | {
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "checkout": os.environ.get("ROLLOUT_BUFFER_DEVICE_CHECKOUT", ""),
        }
        self._written: list[Path] = []
        self._started = _start_of(os.getpid()) or 0
        self._has_adb_server = False

    def drop_ended(self) -> None:
        """Removes what watchdogs left on record that were killed themselves: ids that mean nothing any more."""
        for path in self._folder.glob("[0-9]*-[0-9]*"):
            pid, _, start = path.name.partition("-")
            if pid.isdecimal() and start.isdecimal() and _start_of(int(pid)) != int(start):
                path.unlink(missing_ok=True)

    def add(self, kind: str, pid: int) -> None:
        start = _start_of(pid)
        if start is None:  # it has ended already
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{pid}-{start}"
        part = self._folder / f".{pid}-{start}"
        part.write_text("".join(f"{key}={value}\n" for key, value in {"kind": kind, **self._facts}.items()))
        part.replace(path)
        self._written.append(path)

    def add_adb_server(self, port: int) -> None:
        """adb starts its server by itself, some time after the emulator: whoever listens on our port since then."""
        if self._has_adb_server:
            return
        for pid in _listeners(port):
            if (_start_of(pid) or 0) >= self._started:
                self.add("adb_server", pid)
                self._has_adb_server = True

    def clear(self) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return None


def _listeners(port: int) -> list[int]:
    """Processes of this user that listen on a TCP port of this host."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not wanted:
        return []
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry.path) in wanted for entry in os.scandir(folder)):
                found.append(int(folder.parent.name))
        except OSError:  # another user's process, or one that just ended
            continue
    return found


def _listening_inodes(port: int) -> list[str]:
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        rows = map(str.split, lines)
        found += [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]
    return found


def _dies_with(watchdog: int) -> Callable[[], None]:
    """Returns what the emulator does before it starts: it asks the kernel for SIGKILL should the watchdog be killed."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != watchdog:  # it was killed before the kernel was asked
            os._exit(1)

    return before_exec


def _leave(*_: object) -> None:
    raise SystemExit(143)


def _owner_is_gone() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def _introduce(serial: str, port: int) -> None:
    """Tells the adb server on this port of the emulator, as emulators do when they start; it may know it already."""
    console = serial.rpartition("-")[2]
    if not console.isdecimal():
        return
    request = f"host:emulator:{int(console) + 1}"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_POLL_S) as server:
            server.sendall(f"{len(request):04x}{request}".encode())
            server.recv(1)  # it answers by closing
    except OSError:  # there is no server, or it is busy: the next time will do
        pass


def _adb(adb: str, port: str, *words: str) -> None:
    """Asks adb, for a short while; the emulator is ended by signal in any case."""
    try:
        subprocess.run([adb, "-P", port, *words], capture_output=True, timeout=_ADB_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"adb {' '.join(words)}: {error}\n")


def _end_adb_server(adb: str, port: str) -> None:
    """Ends the server, and those that take its place: any command of adb that is under way meanwhile starts one."""
    _adb(adb, port, "kill-server")
    for _ in range(_LAST_LOOKS):
        time.sleep(_POLL_S)
        if _listening_inodes(int(port)):
            _adb(adb, port, "kill-server")


def _end(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Ends the process group: SIGTERM, after ``timeout_s`` SIGKILL. The group is gone when this returns."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + timeout_s
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
