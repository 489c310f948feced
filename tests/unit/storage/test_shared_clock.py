"""The machine's clock is set forward by a day, or back: nothing has aged by it, whichever process looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.prometheus import metrics_page
from slime_plugins.rollout_buffer.state.runner_reports import recent_device_pools, store_report
from slime_plugins.rollout_buffer.storage import shared_clock
from slime_plugins.rollout_buffer.storage.retention import purge
from slime_plugins.rollout_buffer.storage.shared_clock import SharedClock
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import clock_rows
from slime_plugins.rollout_buffer.types import Image
from slime_plugins.rollout_buffer.wire.query_params import OverviewQuery
from slime_plugins.rollout_buffer.wire.request_fields import parse
from tests.support import PNG, poll, slot_counts, start_external, uids, write, written
from tests.unit.state.test_buffer import idle_job

DAY_S = 86_400.0
SUPERVISOR = "supervisor"


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000.0, 500.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def process(self, folder: Path) -> Buffer:
        """A process on it that has the data directory open."""
        store = Store(folder)
        store.clock.close()
        store.clock = SharedClock(folder, wall=lambda: self.wall, monotonic=lambda: self.monotonic)
        return Buffer(store)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def supervisor(machine: Machine, tmp_path: Path) -> Iterator[Buffer]:
    """The process that follows the clock."""
    found = machine.process(tmp_path)
    found.follow_clock()
    yield found
    found.store.close()


@pytest.fixture
def server(machine: Machine, tmp_path: Path, supervisor: Buffer) -> Iterator[Buffer]:
    found = machine.process(tmp_path)
    yield found
    found.store.close()


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, 30.0, 400 * DAY_S])
def test_a_lease_lasts_as_long_as_it_was_given(
    machine: Machine, supervisor: Buffer, server: Buffer, jump_s: float
) -> None:
    job = start_external(server, 1)
    write(server, job, written("a"))
    assert uids(server, poll(server, job, lease_s=60)) == ["a"]
    machine.passes(20)
    supervisor.follow_clock()
    machine.wall += jump_s
    server.expire_leases()  # before the supervisor has seen it
    assert poll(server, job, lease_s=60) is None
    assert supervisor.follow_clock() == jump_s
    assert supervisor.follow_clock() == 0.0
    machine.passes(39)
    assert poll(server, job, lease_s=60) is None
    machine.passes(2)
    assert uids(server, poll(server, job, lease_s=60)) == ["a"]


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_half_filled_group_gets_the_time_it_has(
    machine: Machine, supervisor: Buffer, server: Buffer, jump_s: float
) -> None:
    job = start_external(server, 4, group_timeout_seconds=300)
    write(server, job, written("a"))
    machine.passes(100)
    supervisor.follow_clock()
    machine.wall += jump_s
    assert supervisor.close_timed_out_groups() == 0
    supervisor.follow_clock()
    assert supervisor.close_timed_out_groups() == 0
    machine.passes(199)
    assert supervisor.close_timed_out_groups() == 0
    machine.passes(2)
    assert supervisor.close_timed_out_groups() == 1
    assert slot_counts(server, job)["failed"] == 4


@pytest.mark.parametrize("jump_s", [0.0, DAY_S, -DAY_S])
def test_an_idle_job_that_a_user_resumes_waits_as_long_again_for_a_poll(
    machine: Machine, supervisor: Buffer, jump_s: float
) -> None:
    job = idle_job(supervisor, machine.passes)
    supervisor.pause_idle_jobs()
    supervisor.change_job(job.job_id, "resume")
    machine.wall += jump_s
    supervisor.follow_clock()
    machine.passes(59)
    assert supervisor.pause_idle_jobs() == []
    machine.passes(2)
    assert supervisor.pause_idle_jobs() == [job.job_id]


def test_a_jump_while_nobody_served_is_noted_by_the_next_supervisor(
    machine: Machine, supervisor: Buffer, tmp_path: Path
) -> None:
    job = start_external(supervisor, 1)
    write(supervisor, job, written("a"))
    assert poll(supervisor, job, lease_s=600) is not None
    supervisor.follow_clock()
    machine.passes(100)
    machine.wall += DAY_S
    later = machine.process(tmp_path)
    assert poll(later, job) is None
    assert later.follow_clock() == DAY_S
    assert poll(later, job) is None
    machine.passes(501)
    assert uids(later, poll(later, job)) == ["a"]
    later.store.close()


def test_after_a_restart_of_the_machine_its_clock_is_believed(
    machine: Machine, supervisor: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.wall += DAY_S
    monkeypatch.setattr(shared_clock, "boot_id", lambda: b"another start...".hex())
    later = machine.process(tmp_path)
    assert later.store.clock() == machine.wall
    assert later.follow_clock() == 0.0
    later.store.close()


def test_drift_is_followed_and_is_no_jump(machine: Machine, supervisor: Buffer, server: Buffer) -> None:
    for _ in range(100):
        machine.passes(0.5)
        machine.wall += 0.1
        assert server.store.clock() == machine.wall
        assert supervisor.follow_clock() == 0.0


def test_what_is_kept_for_half_a_day_is_kept_when_the_clock_is_set_forward_by_a_day(
    machine: Machine, supervisor: Buffer
) -> None:
    job = start_external(supervisor, 1)
    write(supervisor, job, written("a"))
    assert poll(supervisor, job) is not None
    machine.wall += DAY_S
    supervisor.follow_clock()
    half_a_day = DAY_S / 2
    clock = supervisor.store.clock
    assert purge(supervisor.store, now=clock(), retain_s=half_a_day).payloads == 0
    machine.passes(half_a_day - 1)
    supervisor.follow_clock()
    assert purge(supervisor.store, now=clock(), retain_s=half_a_day).payloads == 0
    machine.passes(DAY_S + 2)
    supervisor.follow_clock()
    assert purge(supervisor.store, now=clock(), retain_s=half_a_day).payloads == 1


def test_rows_from_before_two_jumps_are_no_older_than_they_are(buffer: Buffer) -> None:
    with buffer.store.write() as connection:
        clock_rows.move_times(connection, DAY_S, 11 * DAY_S)
        clock_rows.move_times(connection, 3 * DAY_S, 19 * DAY_S)
        assert clock_rows.time_of_age(connection, 20 * DAY_S, 7 * DAY_S) == 9 * DAY_S
        assert clock_rows.time_of_age(connection, 20 * DAY_S, DAY_S / 2) == 19.5 * DAY_S


def test_the_times_that_are_shown_follow_the_clock(machine: Machine, supervisor: Buffer) -> None:
    machine.wall += DAY_S
    supervisor.follow_clock()
    assert supervisor.store.clock() == machine.wall
    assert start_external(supervisor, 1).created_at == machine.wall


def test_a_torn_mark_of_the_clock_is_ignored(machine: Machine, supervisor: Buffer, tmp_path: Path) -> None:
    content = (tmp_path / "clock").read_bytes()
    (tmp_path / "clock").write_bytes(content[:20] + b"\xff" + content[21:])
    machine.wall += DAY_S
    assert supervisor.store.clock() == machine.wall


def test_readers_and_writers_go_by_the_same_clock(machine: Machine, supervisor: Buffer) -> None:
    start_external(supervisor, job_id="j")
    supervisor.beat(SUPERVISOR, 1, {})
    farm = {"pool": "p", "devices": []}
    store_report(supervisor.store, supervisor.job("j").key, 1, farm)
    machine.wall += DAY_S  # and the supervisor has not followed yet
    machine.passes(2.0)
    overview = Views(supervisor.store, SUPERVISOR).overview(parse(OverviewQuery, {}))
    assert overview["supervisor_age_s"] == pytest.approx(2.0)
    page = metrics_page(supervisor.store).decode()
    assert "rollout_buffer_supervisor_heartbeat_age_seconds 2.0" in page
    assert list(recent_device_pools(supervisor.store)) == ["p"]


def test_a_screenshot_that_came_alone_is_as_old_as_what_came_with_a_trajectory(
    machine: Machine, supervisor: Buffer
) -> None:
    machine.wall += DAY_S
    assert supervisor.payloads.store_image(Image(data=PNG))
    with supervisor.store.read() as connection:
        ((written_at,),) = connection.execute("SELECT last_used FROM images").fetchall()
    assert written_at == pytest.approx(supervisor.store.clock())
