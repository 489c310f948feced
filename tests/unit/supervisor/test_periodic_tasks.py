"""Tasks are done when they are due; a full, busy or broken disk puts one off and takes nothing down."""

from __future__ import annotations

import logging
import sqlite3
import threading

import pytest

from slime_plugins.rollout_buffer.errors import StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.supervisor.periodic_tasks import STUCK_AFTER_S, PeriodicTasks, PeriodicThread
from slime_plugins.rollout_buffer.testing.clock import SettableClock


class Disk:
    """Fails every write with an error, while there is one."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.writes = 0

    def write_rows(self) -> None:
        if self.error is not None:
            raise self.error
        self.writes += 1


ERRORS = [
    StorageFullError("the disk is full"),
    UnavailableError("the store is busy"),
    sqlite3.OperationalError("disk I/O error"),
    OSError(30, "Read-only file system"),
]


def test_each_duty_is_done_at_its_own_interval() -> None:
    often, seldom, clock = Disk(), Disk(), SettableClock()
    tasks = PeriodicTasks({often.write_rows: 1.0, seldom.write_rows: 3.0}, clock=clock)
    for _ in range(6):
        tasks.run_due()
        tasks.run_due()
        clock.now += 1
    assert (often.writes, seldom.writes) == (6, 2)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_disk_postpones_a_task_and_is_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk, other = Disk(), Disk()
    tasks = PeriodicTasks({disk.write_rows: 0.0, other.write_rows: 0.0})
    disk.error = error
    for _ in range(100):
        tasks.run_due()
    assert other.writes == 100
    problem = tasks.problem()
    assert problem is not None
    assert problem.startswith("write rows is postponed: ")
    assert len(caplog.records) == 1
    disk.error = None
    tasks.run_due()
    assert tasks.problem() is None
    assert caplog.messages[1:] == ["write rows: done again"]


def test_a_defect_in_the_thread_is_raised_by_check() -> None:
    disk = Disk()
    disk.error = KeyError("defect")
    thread = PeriodicThread("writes", PeriodicTasks({disk.write_rows: 0.0}), tick_s=0.01)
    thread.check()
    thread.start()
    assert thread.stop(30)
    with pytest.raises(KeyError):
        thread.check()


def test_a_task_that_hangs_is_named_and_blocks_only_its_thread() -> None:
    clock, hanging, released = SettableClock(), threading.Event(), threading.Event()

    def write_rows() -> None:
        hanging.set()
        released.wait(60)

    thread = PeriodicThread("writes", PeriodicTasks({write_rows: 0.0}, clock=clock), tick_s=0.01)
    thread.start()
    assert hanging.wait(60)
    assert thread.tasks.problem() is None
    clock.now += STUCK_AFTER_S + 1
    assert thread.tasks.problem() == "write rows has been running for 16 s"
    assert not thread.stop(0.01)
    released.set()
    assert thread.stop(60)
