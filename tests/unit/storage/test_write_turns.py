"""Writers take the lock one at a time; a holder that hangs is named, and blocks the others no longer than a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.observability.process_status import ProcessStatus
from slime_plugins.rollout_buffer.storage import write_lock
from slime_plugins.rollout_buffer.storage.write_lock import WriteLock, WriteLockOwner

HOLDER = """
import os, signal, sys
from pathlib import Path
from slime_plugins.rollout_buffer.storage.write_lock import WriteLock
with WriteLock(Path(sys.argv[1])).hold():
    print("holds it", flush=True)
    sys.stdin.readline()
print("let go", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the turn, until it reads a line."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds it\n"
        yield process
        process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[WriteLock]:
    found = WriteLock(tmp_path)
    yield found
    found.close()


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lock, "LOCK_TIMEOUT_S", 0.3)


def test_the_owner_is_the_process_that_holds_the_lock(lock: WriteLock) -> None:
    assert lock.owner() is None
    with lock.hold():
        owner = lock.owner()
        assert isinstance(owner, WriteLockOwner)
        assert owner.pid == os.getpid()
    assert lock.owner() is None


@pytest.mark.usefixtures("short_timeout")
def test_a_stopped_holder_is_named_and_waiting_writers_time_out(lock: WriteLock, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        says = rf"process {process.pid} \(stopped\).*kill -CONT {process.pid}"
        for _ in range(3):
            with pytest.raises(UnavailableError, match=says), lock.hold():
                pass
        os.kill(process.pid, signal.SIGCONT)
        tell(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "let go\n"
        with lock.hold():
            owner = lock.owner()
        assert owner is not None
        assert owner.pid == os.getpid()


def test_a_waiting_writer_gets_the_lock_when_the_holder_dies(lock: WriteLock, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        threading.Timer(0.2, process.kill).start()
        with lock.hold():
            owner = lock.owner()
        assert owner is not None
        assert owner.pid == os.getpid()


@pytest.mark.usefixtures("short_timeout")
def test_a_dead_holder_owns_nothing(lock: WriteLock, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        assert lock.owner() is not None
        process.kill()
        process.wait()
        assert lock.owner() is None


def test_a_sibling_thread_that_hangs_holds_nobody_up_for_ever(lock: WriteLock, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with lock.hold():
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    assert entered.wait(30)
    monkeypatch.setattr(write_lock, "LOCK_TIMEOUT_S", 0.2)
    with pytest.raises(UnavailableError, match=f"process {os.getpid()}"), lock.hold():
        pass
    leave.set()
    thread.join()


def test_who_takes_the_lock_again_and_again_lets_in_who_waits_once_per_turn(
    lock: WriteLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, pauses, now = WriteLock(tmp_path), list[float](), [0.0]

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(write_lock, "LOCK_TIMEOUT_S", 0.0001)
    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    paused = []
    for _ in range(5):
        pauses.clear()
        with lock.hold():
            paused.append(list(pauses))
            with pytest.raises(UnavailableError), other.hold():
                pass
            now[0] += 0.6 * write_lock.MAX_TURN_S
    assert paused == [[], [], [write_lock.MAX_LOCK_PAUSE_S], [], [write_lock.MAX_LOCK_PAUSE_S]]
    other.close()


def test_who_has_waited_takes_the_lock_again_without_a_pause(
    lock: WriteLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, pauses, holding = WriteLock(tmp_path), list[float](), ExitStack()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        holding.close()

    monkeypatch.setattr(time, "sleep", pause)
    holding.enter_context(lock.hold())
    for _ in range(2):
        with other.hold():
            assert pauses == [write_lock.MIN_LOCK_PAUSE_S]
    other.close()


COUNTER = """
import sys
from pathlib import Path
from slime_plugins.rollout_buffer.storage.write_lock import WriteLock
lock, path = WriteLock(Path(sys.argv[1])), Path(sys.argv[1]) / "count"
for _ in range(200):
    with lock.hold():
        path.write_text(str(int(path.read_text()) + 1))
"""


def test_only_one_process_at_a_time_has_the_turn(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    writers = [subprocess.Popen([sys.executable, "-c", COUNTER, str(tmp_path)]) for _ in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    assert (tmp_path / "count").read_text() == "800"


def test_a_later_process_with_the_same_id_owns_nothing(lock: WriteLock, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock.hold():
        another = ProcessStatus(state="R", parent=1, session=1, started=1, cpu_ticks=0)
        monkeypatch.setattr(write_lock, "process_status", lambda pid: another)
        assert lock.owner() is None
