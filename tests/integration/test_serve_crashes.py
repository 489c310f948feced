"""``rollout-buffer serve`` after ``kill -9``, process by process: up again at once, and nothing left over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, ChildRecords, ProcessIdentity
from tests.integration.conftest import BufferProcess, answers
from tests.processes import children_of
from tests.support import written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

StartBuffer = Callable[..., BufferProcess]
GENERATORS = Path(__file__).parents[1] / "crash" / "generators"
IMPATIENT = """
import sys
from slime_plugins.rollout_buffer.supervisor import supervisor
from slime_plugins.rollout_buffer.cli.app import main
supervisor.ORPHAN_TIMEOUT_S = 1.0
sys.argv[:4] = ["rollout-buffer"]
main()
"""


def wait_in_vain(url: str, job_id: str, count: int) -> tuple[list[threading.Thread], list[str]]:
    """Starts polls that wait for groups which never come; the second list gets the errors that end a poll."""
    cut_off: list[str] = []

    def wait() -> None:
        try:
            RolloutBufferClient(url).get_rollout_data(job_id=job_id, wait_s=60, lease_s=60)
        except (requests.RequestException, RolloutBufferError, ValueError) as error:
            cut_off.append(repr(error))  # the server ended under it

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, cut_off


def start_external(buffer: BufferProcess) -> str:
    return buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1}).job_id


def start_episodes(buffer: BufferProcess, count: int) -> str:
    path = buffer.folder / "episodes.jsonl"
    path.write_text("".join(json.dumps({"instance_id": f"p{number}-fine"}) + "\n" for number in range(count)))
    payload = {
        "task_type": "crash_episodes",
        "input_file": str(path),
        "remote_engine_url": "http://127.0.0.1:9",
        "num_repeat_per_sample": 2,
        "num_process": 4,
    }
    return buffer.client.start_rollout(payload).job_id


@pytest.mark.slow
def test_after_a_killed_supervisor_serve_is_up_at_once_with_polls_waiting_and_processes_frozen(
    start_buffer: StartBuffer,
) -> None:
    buffer = start_buffer("--generator-dir", str(GENERATORS), launcher=(sys.executable, "-c", IMPATIENT))
    job_id = start_external(buffer)
    start_episodes(buffer, 2000)
    runner = ProcessIdentity.of("runner", buffer.runner_pid())
    server = ProcessIdentity.of("server", buffer.child("-m gunicorn"))
    wait_in_vain(buffer.url, job_id, 6)
    time.sleep(0.5)
    os.kill(runner.pid, signal.SIGSTOP)
    os.kill(next(iter(children_of(server.pid))), signal.SIGSTOP)
    buffer.kill_supervisor(awaits_orphans=False)
    began = time.monotonic()
    buffer.start()
    assert time.monotonic() - began < 40  # a second or two with nothing else to do; the polls wait for a minute
    wait_until(lambda: server.members() == [], 30, "end of the frozen worker")
    wait_until(lambda: runner.members() == [], 30, "end of the frozen runner")


def test_a_server_killed_alone_is_replaced_with_its_workers(start_buffer: StartBuffer) -> None:
    buffer = start_buffer()
    job_id = start_external(buffer)
    server = ProcessIdentity.of("server", buffer.child("-m gunicorn"))
    wait_in_vain(buffer.url, job_id, 6)
    time.sleep(0.5)
    began = time.monotonic()
    buffer.kill_server()
    assert time.monotonic() - began < 40  # the polls wait for a minute
    assert server.members() == []
    reply = buffer.client.write([written("u", "i")], job_id=job_id)
    assert reply["results"] == [{"uid": "u", "status": "stored"}]


def test_waiting_polls_starve_no_other_request_and_serve_stops_within_seconds(start_buffer: StartBuffer) -> None:
    buffer = start_buffer("--workers", "1", "--threads", "4")
    job_id = start_external(buffer)
    threads, cut_off = wait_in_vain(buffer.url, job_id, 12)
    time.sleep(0.5)
    began = time.monotonic()
    assert buffer.client.job(job_id)["job_id"] == job_id
    assert time.monotonic() - began < 30  # the polls wait for a minute
    os.kill(buffer.process.pid, signal.SIGTERM)
    wait_until(lambda: buffer.process.exit_code() is not None, 40, "the end")
    assert buffer.process.exit_code() == 0
    assert ChildRecords(buffer.folder / "data" / "children.json").orphans() == []
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert cut_off == []  # they were answered: gunicorn cuts off only what does not end in time


def freeze_between_transactions(pid: int, data_dir: Path) -> None:
    """Freezes a runner while it does not have the write lock: with it, nobody else could write until it dies."""
    with (data_dir / "writer.active").open("wb") as turn:
        while True:
            os.kill(pid, signal.SIGSTOP)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return  # closing the file lets go of the turn
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)


def freeze_in_a_transaction(pid: int, data_dir: Path) -> None:
    """Freezes the supervisor while it has the write lock, which it takes for its heartbeat every two seconds."""
    with (data_dir / "writer.active").open("rb") as turn:
        while True:
            if os.pread(turn.fileno(), 64, 0).split()[:1] != [str(pid).encode()]:
                time.sleep(0.0001)
                continue
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.2)
            if os.pread(turn.fileno(), 64, 0).split()[:1] == [str(pid).encode()]:
                return
            os.kill(pid, signal.SIGCONT)


def test_a_supervisor_frozen_in_the_middle_of_a_write_is_ended_by_a_worker_and_the_next_one_writes(
    start_buffer: StartBuffer, tmp_path: Path
) -> None:
    buffer = start_buffer("--writer-turn-limit-s", "2")
    job_id = start_external(buffer)
    buffer.client.write([written("before", "before")], job_id=job_id)
    freeze_in_a_transaction(buffer.process.pid, tmp_path / "data")
    wait_until(lambda: buffer.process.exit_code() is not None, 30, "the end of the frozen supervisor")
    assert buffer.process.exit_code() == -signal.SIGKILL
    wait_until(lambda: not answers(f"{buffer.url}/health"), 30, "the end of its server")
    buffer.start()  # as systemd does, or a container
    reply = buffer.client.write([written("before", "before"), written("after", "after")], job_id=job_id)
    assert [result["status"] for result in reply["results"]] == ["duplicate", "stored"]
    log = "".join(path.read_text() for path in (tmp_path / "data" / "logs").glob("server*"))
    assert "killing it, the supervisor" in log


def test_a_frozen_runner_that_wakes_after_its_replacement_writes_nothing(
    start_buffer: StartBuffer, tmp_path: Path
) -> None:
    buffer = start_buffer("--generator-dir", str(GENERATORS))
    job_id = start_episodes(buffer, 60)
    old = buffer.runner_pid()
    wait_until(lambda: buffer.client.job(job_id)["outcomes"].get("completed", 0) > 10, what="some episodes")
    freeze_between_transactions(old, tmp_path / "data")
    job_key = 1  # the only job
    command = [
        sys.executable, "-m", "slime_plugins.rollout_buffer.runner.main", "--data-dir", str(tmp_path / "data"),
        "--job-key", str(job_key), "--buffer-url", buffer.url, "--generator-dir", str(GENERATORS),
    ]  # fmt: skip
    new = ChildProcess("second runner", command, log_file=tmp_path / "second.log")
    wait_until(lambda: new.exit_code() is not None, 60, "the end of the second runner")
    assert new.exit_code() == 0, new.log_tail(20)
    finished = buffer.client.job(job_id)
    assert finished["state"] == "finished"
    os.kill(old, signal.SIGCONT)
    wait_until(lambda: old not in buffer.children(), 30, "the end of the old runner")
    assert buffer.client.job(job_id)["attempts"] == finished["attempts"]
    assert "was replaced" in (tmp_path / "data" / "logs" / f"runner-{job_key}.log").read_text()
