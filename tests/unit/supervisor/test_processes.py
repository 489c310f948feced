"""Child processes are ended by what they are, not by their number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from slime_plugins.rollout_buffer.supervisor.child_processes import (
    ChildProcess,
    ChildRecords,
    ProcessIdentity,
    stop_all,
)
from tests.waiting import wait_until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT_OF_SLEEPER = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "time.sleep(60)",
]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ChildProcess]:
    found = ChildProcess("sleeper", SLEEPER, log_file=tmp_path / "log")
    yield found
    found.kill()


def test_a_mark_finds_its_process_and_nothing_after_its_death(child: ChildProcess) -> None:
    assert child.identity.members() == [child.pid]
    child.kill()
    assert child.identity.members() == []
    child.identity.kill()  # a second time changes nothing


def test_a_later_process_with_the_same_id_is_left_alone(child: ChildProcess) -> None:
    earlier = replace(child.identity, started=child.identity.started - 1)
    assert earlier.members() == []
    earlier.kill()
    assert child.exit_code() is None
    assert replace(child.identity, boot="another boot").members() == []


def test_what_outlives_its_leader_is_found_and_ended(tmp_path: Path) -> None:
    parent = ChildProcess("parent", PARENT_OF_SLEEPER, log_file=tmp_path / "log")
    wait_until(lambda: len(parent.identity.members()) == 2)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: parent.exit_code() is not None)
    (orphan,) = parent.identity.members()
    assert orphan != parent.pid
    parent.kill()
    assert parent.identity.members() == []


def test_records_come_back_as_they_were_and_are_gone_after_an_orderly_end(tmp_path: Path, child: ChildProcess) -> None:
    path = tmp_path / "children.json"
    records = ChildRecords(path)
    assert records.orphans() == []
    records.keep([child.identity])
    written_at = path.stat().st_mtime_ns
    records.keep([child.identity])
    assert path.stat().st_mtime_ns == written_at, "a parent calls ten times a second"
    assert ChildRecords(path).orphans() == [child.identity]
    records.clear()
    assert records.orphans() == []
    records.clear()


class Hanging:
    """A process that does not exit in the time that it is given."""

    def __init__(self) -> None:
        self.signals = 0
        self.waited_s: list[float] = []

    def send_stop_signal(self) -> None:
        self.signals += 1

    def stop(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        time.sleep(timeout_s)


def test_processes_that_hang_share_the_time_to_stop() -> None:
    hanging = [Hanging(), Hanging(), Hanging()]
    stop_all(cast("list[ChildProcess]", hanging), 0.01)
    assert [one.signals for one in hanging] == [1, 1, 1]
    assert [one.waited_s for one in hanging[1:]] == [[0.0], [0.0]]


def test_a_child_hears_of_its_parents_death(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess\n"
        "child = ChildProcess('c', [sys.executable, '-c', 'import time; time.sleep(60)'], log_file=Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        identity = ProcessIdentity.of("c", int(parent.stdout.readline()))
        assert identity.members()
        parent.kill()
    wait_until(lambda: identity.members() == [])


def test_a_full_disk_has_room_for_the_records_of_other_children(tmp_path: Path, child: ChildProcess) -> None:
    """They are written over in place: a second file would find no room."""
    path = tmp_path / "children.json"
    records = ChildRecords(path)
    records.keep([])
    size, number = path.stat().st_size, path.stat().st_ino
    records.keep([child.identity] * 100)
    assert (path.stat().st_size, path.stat().st_ino) == (size, number)
    assert len(records.orphans()) == 100
    records.keep([child.identity])
    assert records.orphans() == [child.identity]


def test_children_start_and_end_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records = ChildRecords(tmp_path / "file" / "children.json")
    child = ChildProcess("sleeper", SLEEPER, log_file=tmp_path / "file" / "log")
    records.keep([child.identity])
    assert child.exit_code() is None
    assert child.log_tail() == ""
    child.kill()
    records.clear()
