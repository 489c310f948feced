"""The supervisor's judgement, without processes."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from slime_plugins.rollout_buffer import supervisor as rooms
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.config import ServeSettings
from slime_plugins.rollout_buffer.errors import ConfigError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.life_signs import Silence
from slime_plugins.rollout_buffer.processes import ChildProcess
from slime_plugins.rollout_buffer.supervisor import MAX_CRASHES, Supervisor, _RunnerSlot
from slime_plugins.rollout_buffer.tables.job_rows import JobRecord
from tests.unit.test_buffer_after_crashes import played, start_played


class DeadRunner:
    """A runner that was killed; says whether its session was ended."""

    ended = False

    def exit_code(self) -> int:
        return -9

    def last_words(self) -> str:
        return "killed"

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def supervisor(tmp_path: Path, buffer: Buffer) -> Supervisor:
    found = Supervisor(ServeSettings(data_dir=tmp_path / "data"))
    found._buffer = buffer
    return found


def crash(supervisor: Supervisor, job: JobRecord, slot: _RunnerSlot) -> DeadRunner:
    runner = DeadRunner()
    slot.process, slot.started_at = cast("Any", runner), time.monotonic()
    supervisor._look_after(job, slot)
    slot.trajectories = supervisor._buffer.count_trajectories(job.key)  # as the start of the next one notes it
    return runner


def test_a_runner_that_crashes_again_and_again_fails_its_job(supervisor: Supervisor, buffer: Buffer) -> None:
    job, slot = start_played(buffer), _RunnerSlot()
    for _ in range(MAX_CRASHES):
        assert buffer.job(job.job_id).state.value == "running"
        assert crash(supervisor, job, slot).ended
    assert buffer.job(job.job_id).state.value == "failed"


def test_runners_that_are_killed_while_they_get_on_never_fail_their_job(supervisor: Supervisor, buffer: Buffer) -> None:
    job, slot = start_played(buffer, tuple(f"i{n}" for n in range(2 * MAX_CRASHES))), _RunnerSlot()
    for group in buffer.open_groups(job.key, after=(-1, -1), limit=2 * MAX_CRASHES):
        fence = buffer.begin_running(job.key)
        attempt = buffer.begin_attempt(fence, group, 0)
        assert attempt is not None
        buffer.add_trajectory(fence, group, 0, attempt, played(f"t{group.key}", group.instance_id))
        crash(supervisor, job, slot)
        assert slot.crashes == 1
    assert buffer.job(job.job_id).state.value == "running"


@pytest.mark.parametrize("error", [StorageFullError("the disk is full"), UnavailableError("busy")])
def test_a_full_or_busy_store_does_not_take_the_supervisor_down(supervisor: Supervisor, error: Exception) -> None:
    def duty() -> None:
        raise error

    supervisor._do(duty)


def test_a_defect_is_not_hidden(supervisor: Supervisor) -> None:
    def duty() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        supervisor._do(duty)


def test_a_taken_port_is_waited_for_only_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["Address already in use", "Address already in use", None])
    monkeypatch.setattr(rooms, "_why_taken", lambda host, port: next(answers))
    rooms._wait_for_port("127.0.0.1", 1, 5.0)
    monkeypatch.setattr(rooms, "_why_taken", lambda host, port: "Address already in use")
    with pytest.raises(ConfigError, match="give another --port"):
        rooms._wait_for_port("127.0.0.1", 1, 0.0)


FROZEN_IN_A_TRANSACTION = """
import os, signal, sys
from pathlib import Path
from slime_plugins.rollout_buffer.store import Store
with Store(Path(sys.argv[1])).write():
    Path(sys.argv[2]).touch()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_runner_frozen_in_the_middle_of_a_transaction_is_killed_and_holds_nobody_up(
    supervisor: Supervisor, buffer: Buffer, tmp_path: Path
) -> None:
    """It has the writers' turn: whoever writes waits for it, the supervisor too."""
    supervisor.settings = ServeSettings(data_dir=tmp_path / "data", runner_patience_s=0.2)
    sign = tmp_path / "sign"
    slot = _RunnerSlot(silence=Silence(sign))
    command = [sys.executable, "-c", FROZEN_IN_A_TRANSACTION, str(buffer.store.data_dir), str(sign)]
    slot.process = ChildProcess("frozen runner", command, log_file=tmp_path / "frozen.log")
    while not sign.exists():
        time.sleep(0.01)
    supervisor._runners[1] = slot

    watch = threading.Thread(target=supervisor._watch_for_silence)
    watch.start()
    buffer.beat("supervisor", 1, {})
    supervisor._stopping = True
    watch.join()

    assert slot.process.exit_code() == -signal.SIGKILL
