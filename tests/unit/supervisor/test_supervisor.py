"""What the supervisor starts, restarts and gives up, with fake processes."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.supervisor import supervisor as module
from slime_plugins.rollout_buffer.supervisor.restart_policies import MAX_CRASHES
from slime_plugins.rollout_buffer.supervisor.supervised_child import ChildState
from slime_plugins.rollout_buffer.supervisor.supervisor import Supervisor
from tests.support import begun_attempt, start_played, trajectory
from tests.unit.supervisor.test_supervised_child import Process


class Started:
    """Stands for ``ChildProcess``: keeps the command line of each start, and a fake process in its place."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.processes: list[Process] = []
        self.descriptors: list[tuple[int, ...]] = []

    def __call__(self, name: str, command: list[str], **options: Any) -> Any:
        self.commands.append(command)
        self.processes.append(Process())
        self.descriptors.append(options["descriptors"])
        return self.processes[-1]

    def of(self, module: str) -> list[Process]:
        """Returns the processes of a module, oldest first."""
        return [one for one, command in zip(self.processes, self.commands, strict=True) if module in " ".join(command)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(module, "ChildProcess", found)
    return found


@pytest.fixture
def supervisor(tmp_path: Path, buffer: Buffer) -> Supervisor:
    found = Supervisor(ServeSettings(data_dir=buffer.store.data_dir))
    found._buffer = buffer
    task_types = {"phones": {"needs_ray": True}, "math": {"needs_ray": False}}
    found._discovery.catalog = {"task_types": task_types, "broken_generators": {}, "files": {}}
    return found


def reconcile(supervisor: Supervisor) -> None:
    """What the main thread does with runners in one turn, backoff left out."""
    for runner in supervisor._runners.values():
        runner.child._not_before = 0.0
    if supervisor._ray is not None:
        supervisor._ray._not_before = 0.0
    supervisor._read_jobs()
    supervisor._reconcile_runners()


def state_of(buffer: Buffer, job: JobRecord) -> str:
    return buffer.job(job.job_id).state.value


def test_a_job_goes_on_while_its_generator_file_does_not_load_and_fails_only_when_its_runner_ends(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer)
    reconcile(supervisor)
    assert supervisor._discovery.catalog is not None
    broken = {"my.py": "my.py, line 3: SyntaxError: invalid syntax"}
    supervisor._discovery.catalog = {**supervisor._discovery.catalog, "task_types": {}, "broken_generators": broken}
    reconcile(supervisor)
    assert supervisor._to_fail == {}

    started.processes[-1].code = 1
    for _ in range(3):
        reconcile(supervisor)

    assert "my.py, line 3: SyntaxError" in supervisor._to_fail[job.key]
    assert len(started.processes) == 1


def test_a_refused_start_leaves_no_new_folder_behind(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for folder, ports in itertools.product(
            (tmp_path / "new", buffer.store.data_dir), ({"port": port}, {"port": 0, "gateway_port": port})
        ):
            with pytest.raises(ConfigError, match="cannot serve on"):
                Supervisor(ServeSettings(data_dir=folder, **ports)).run()
    assert not (tmp_path / "new").exists()
    assert (buffer.store.data_dir / "buffer.sqlite3").exists()


def test_when_it_says_that_it_serves_servers_accept_jobs(supervisor: Supervisor, started: Started) -> None:
    beats_when_ready: list[Any] = []
    supervisor.on_ready = lambda _: beats_when_ready.append(supervisor._heartbeat.last())
    supervisor._heartbeat.beat(starting="generators are being listed")
    supervisor._stored_catalog = supervisor._discovery.catalog
    supervisor._server.reconcile()
    supervisor._report_ready()
    assert beats_when_ready == [], "no worker of the server has said that it answers"
    supervisor._server_ready.beat()
    supervisor._server.reconcile()
    supervisor._report_ready()
    assert [beat.detail for beat in beats_when_ready] == [{}]


def test_a_runner_that_crashes_again_and_again_fails_its_job(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer)
    for _ in range(MAX_CRASHES):
        reconcile(supervisor)
        started.processes[-1].code = 1
        reconcile(supervisor)
        assert state_of(buffer, job) == "running"
    assert len(started.processes) == MAX_CRASHES
    supervisor._fail_jobs()
    assert state_of(buffer, job) == "failed"
    assert "8 times in a row" in (buffer.job(job.job_id).cause or "")
    reconcile(supervisor)
    assert supervisor._runners == {}
    assert len(started.processes) == MAX_CRASHES


def test_runners_that_are_killed_while_they_get_on_never_fail_their_job(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer, tuple(f"i{n}" for n in range(2 * MAX_CRASHES)))
    for group in buffer.open_groups(job.key, after=(-1, -1), limit=2 * MAX_CRASHES):
        reconcile(supervisor)
        fence = buffer.begin_running(job.key)
        attempt = begun_attempt(buffer, fence, group, 0)
        buffer.add_trajectory(fence, group, 0, attempt, trajectory(f"t{group.key}", group.instance_id))
        started.processes[-1].code = -9
        reconcile(supervisor)
        assert supervisor._runners[job.key].child.crashes == 1
    assert supervisor._to_fail == {}


def ray_says(supervisor: Supervisor, address: str) -> None:
    supervisor._ray_heartbeat.beat(address=address)


def test_a_ray_that_never_starts_fails_the_jobs_that_wait_for_it_and_a_later_job_tries_anew(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job, other = start_played(buffer, task_type="phones"), start_played(buffer, job_id="other")
    while job.key not in supervisor._to_fail:
        reconcile(supervisor)
        started.of("local_ray")[-1].code = 1
    assert len(started.of("local_ray")) == MAX_CRASHES
    assert "local Ray does not start (8 tries)" in supervisor._to_fail[job.key]
    supervisor._fail_jobs()
    reconcile(supervisor)
    assert (state_of(buffer, job), state_of(buffer, other)) == ("failed", "running")
    start_played(buffer, task_type="phones", job_id="later")
    reconcile(supervisor)
    assert len(started.of("local_ray")) == MAX_CRASHES + 1


def test_while_ray_hangs_everybody_else_is_looked_after(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    """For 300 s nothing is heard of it, and a gunicorn that died meanwhile is up again at the next look."""
    start_played(buffer, task_type="phones")
    start_played(buffer, job_id="other")
    supervisor._reconcile_services()
    for _ in range(5):
        reconcile(supervisor)
    assert (len(started.of("local_ray")), len(started.of("runner.main"))) == (1, 1)
    started.of("gunicorn")[0].code = -9
    supervisor._reconcile_services()
    supervisor._server._not_before = 0.0
    supervisor._reconcile_services()
    assert len(started.of("gunicorn")) == 2


def test_runners_of_a_ray_that_died_go_on_with_the_next_one_and_that_is_no_crash(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer, task_type="phones")
    reconcile(supervisor)
    ray_says(supervisor, "127.0.0.1:1")
    for _ in range(3):
        reconcile(supervisor)
    (runner,) = started.of("runner.main")
    started.of("local_ray")[0].code = -9
    reconcile(supervisor)
    assert runner.signals == ["TERM"]
    runner.code = 0
    reconcile(supervisor)
    assert len(started.of("runner.main")) == 1
    ray_says(supervisor, "127.0.0.1:2")
    for _ in range(3):
        reconcile(supervisor)
    assert len(started.of("runner.main")) == 2
    assert "127.0.0.1:2" in started.commands[-1]
    assert supervisor._runners[job.key].child.crashes == 0


def test_a_store_that_hangs_holds_up_no_child(
    supervisor: Supervisor, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds the turn to write, and is frozen."""
    hanging, released = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        hanging.set()
        released.wait(60)

    monkeypatch.setattr(supervisor._buffer, "beat", hang, raising=False)
    supervisor._writing.start()
    assert hanging.wait(60)
    for _ in range(3):
        supervisor._tasks.run(supervisor._reconcile_services)
        for process in started.processes:
            process.code = -9
        supervisor._server._not_before = 0.0
    assert len(started.of("gunicorn")) >= 2
    released.set()
    assert supervisor._writing.stop(60)


def test_a_write_that_hangs_at_the_end_shares_the_time_of_the_children(
    supervisor: Supervisor, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_to_stop: list[float] = []
    released = threading.Event()
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(module, "stop_all", lambda _, timeout_s: times_to_stop.append(timeout_s))
    monkeypatch.setattr(supervisor._buffer, "beat", lambda *_: released.wait(60), raising=False)
    supervisor._lock, supervisor._records, supervisor._sockets = Mock(), Mock(), []
    supervisor._writing.start()
    supervisor._stop_all()
    assert 0.0 < times_to_stop[0] <= 0.8
    released.set()
    assert supervisor._writing.stop(60)


def test_a_runner_whose_job_is_over_may_end_by_itself_and_is_killed_when_it_does_not(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer)
    reconcile(supervisor)
    buffer.change_job(job.job_id, "cancel")
    reconcile(supervisor)
    assert started.processes[0].signals == []
    supervisor._runners[job.key].child._deadline = 0.0
    reconcile(supervisor)
    reconcile(supervisor)
    assert "KILL" in started.processes[0].signals
    assert supervisor._runners == {}


def test_a_job_that_is_started_again_while_its_runner_exits_gets_another(
    supervisor: Supervisor, buffer: Buffer, started: Started
) -> None:
    job = start_played(buffer)
    reconcile(supervisor)
    buffer.fail_job(job.key, "its attempts failed")
    reconcile(supervisor)
    assert start_played(buffer).key == job.key
    started.processes[0].code = 0
    for _ in range(3):
        reconcile(supervisor)
    assert len(started.processes) == 2
    assert supervisor._runners[job.key].child.state is ChildState.RUNNING
