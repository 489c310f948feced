"""A holder of the write lock that hangs is told from one that works or waits for the disk."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.storage.write_lock import WriteLockOwner, WriteLockWatch
from slime_plugins.rollout_buffer.supervisor import supervisor as module
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.supervisor.supervisor import Supervisor
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.waiting import wait_until

ASLEEP = WriteLockOwner(pid=1, started=1, held_s=100.0, state="T", cpu_ticks=5)


def watch(*owners: WriteLockOwner | None) -> list[bool]:
    """What a watch of 10 s says of holders that it sees 6 s apart."""
    clock = SettableClock()
    found = WriteLockWatch(10.0, clock=clock)
    said = []
    for owner in owners:
        said.append(found.is_stuck(owner))
        clock.now += 6
    return said


def test_a_holder_that_has_not_moved_for_the_limit_is_stuck() -> None:
    assert watch(ASLEEP, ASLEEP, ASLEEP) == [False, False, True]


def test_a_holder_that_computes_is_not_stuck() -> None:
    assert watch(*(replace(ASLEEP, cpu_ticks=ticks) for ticks in range(5))) == [False] * 5


def test_a_holder_that_waits_for_the_disk_is_not_stuck() -> None:
    assert watch(*[replace(ASLEEP, state="D")] * 5) == [False] * 5


def test_holders_that_follow_one_another_are_not_stuck() -> None:
    assert watch(*(replace(ASLEEP, pid=pid) for pid in range(5))) == [False] * 5
    assert watch(*[replace(ASLEEP, held_s=1.0)] * 5) == [False] * 5
    assert watch(ASLEEP, None, ASLEEP, ASLEEP) == [False] * 4


FROZEN = """
import os, signal, sys
from pathlib import Path
from slime_plugins.rollout_buffer.storage.store import Store
with Store(Path(sys.argv[1])).write():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_child_frozen_in_the_middle_of_a_write_is_killed_and_everybody_writes_again(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(ServeSettings(data_dir=buffer.store.data_dir, writer_turn_limit_s=0.3))
    supervisor._buffer = buffer
    frozen = ChildProcess(
        "server", [sys.executable, "-c", FROZEN, str(buffer.store.data_dir)], log_file=tmp_path / "frozen.log"
    )
    monkeypatch.setattr(module, "ChildProcess", lambda *arguments, **options: frozen)
    supervisor._server.reconcile()
    deadline = time.monotonic() + 60
    while frozen.exit_code() is None and time.monotonic() < deadline:
        supervisor._kill_stuck_lock_owner()
        time.sleep(0.05)
    assert frozen.exit_code() == -signal.SIGKILL
    buffer.beat("somebody", os.getpid(), {})


def test_a_stranger_frozen_in_the_middle_of_a_write_is_left_alone(buffer: Buffer, tmp_path: Path) -> None:
    supervisor = Supervisor(ServeSettings(data_dir=buffer.store.data_dir, writer_turn_limit_s=0.1))
    supervisor._buffer = buffer
    frozen = ChildProcess(
        "stranger", [sys.executable, "-c", FROZEN, str(buffer.store.data_dir)], log_file=tmp_path / "frozen.log"
    )
    wait_until(frozen.is_stopped)
    for _ in range(8):
        supervisor._kill_stuck_lock_owner()
        time.sleep(0.05)
    assert frozen.exit_code() is None
    frozen.kill()
