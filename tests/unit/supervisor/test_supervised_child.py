"""A supervised child goes from state to state by steps of which none waits, whatever the child does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.supervisor.restart_policies import RestartPolicy
from slime_plugins.rollout_buffer.supervisor.supervised_child import ChildSpec, ChildState, SupervisedChild
from slime_plugins.rollout_buffer.testing.clock import SettableClock

POLICY = RestartPolicy(first_s=1.0, longest_s=8.0, max_crashes=4, steady_after_s=100.0, heartbeat_timeout_s=10.0)


@dataclass
class Process:
    """A process as the kernel shows it; ``stubborn`` ones do not go away when they are killed."""

    code: int | None = None
    stopped: bool = False
    stubborn: bool = False
    signals: list[str] = field(default_factory=list)

    @property
    def identity(self) -> Process:
        return self

    def exit_code(self) -> int | None:
        return self.code

    def is_stopped(self) -> bool:
        return self.stopped

    def log_tail(self) -> str:
        return "some words"

    def send_stop_signal(self) -> None:
        self.signals.append("TERM")

    def send_kill(self) -> bool:
        self.signals.append("KILL")
        if not self.stubborn and self.code is None:
            self.code = -9
        return self.stubborn


class Nursery:
    """Starts processes of a test and keeps them."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.heartbeats: list[Heartbeat | None] = []
        self.refuse: OSError | None = None

    def __call__(self, heartbeat: Heartbeat | None) -> ChildProcess:
        if self.refuse is not None:
            raise self.refuse
        self.started.append(Process())
        self.heartbeats.append(heartbeat)
        return cast("ChildProcess", self.started[-1])


def child_of(nursery: Nursery, clock: SettableClock, policy: RestartPolicy = POLICY, **more: Any) -> SupervisedChild:
    return SupervisedChild(ChildSpec(name="child", start=nursery, policy=policy, **more), clock=clock)


def state_of(child: SupervisedChild) -> ChildState:
    return child.state


def is_ready(child: SupervisedChild) -> bool:
    return child.ready


def crash(child: SupervisedChild, nursery: Nursery) -> None:
    nursery.started[-1].code = 1
    child.reconcile()


def test_a_child_that_crashes_is_started_again_after_waits_that_double_and_given_up_at_its_limit() -> None:
    nursery, clock = Nursery(), SettableClock()
    child = child_of(nursery, clock)
    for crashes, wait_s in ((1, 1.0), (2, 2.0), (3, 4.0)):
        child.reconcile()
        assert state_of(child) is ChildState.RUNNING
        crash(child, nursery)
        assert (child.state, child.crashes) == (ChildState.WAITING, crashes)
        clock.now += wait_s - 0.1
        child.reconcile()
        assert len(nursery.started) == crashes
        clock.now += 0.1
    child.reconcile()
    crash(child, nursery)
    assert state_of(child) is ChildState.GIVEN_UP
    assert "exit code 1" in child.cause
    assert "some words" in child.cause
    clock.now += 1e6
    child.reconcile()
    assert len(nursery.started) == 4


def test_a_machine_that_cannot_start_it_now_is_no_crash_and_never_ends_the_trying() -> None:
    nursery, clock = Nursery(), SettableClock()
    child = child_of(nursery, clock)
    nursery.refuse = OSError(28, "No space left on device")
    for _ in range(50):
        child.reconcile()
        assert state_of(child) is ChildState.WAITING
        clock.now += 8
    nursery.refuse = None
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING


def test_a_child_that_the_kernel_does_not_let_go_of_is_waited_for_without_waiting() -> None:
    nursery, clock = Nursery(), SettableClock()
    child = child_of(nursery, clock)
    child.reconcile()
    nursery.started[0].stubborn = True
    crash(child, nursery)
    for _ in range(5):
        assert state_of(child) is ChildState.KILLED
        child.reconcile()
    assert nursery.started[0].signals.count("KILL") == 6
    nursery.started[0].stubborn = False
    child.reconcile()
    assert state_of(child) is ChildState.WAITING


def test_a_frozen_child_is_killed_and_started_again() -> None:
    nursery, clock = Nursery(), SettableClock()
    child = child_of(nursery, clock, heartbeats=True)
    child.reconcile()
    heartbeat = nursery.heartbeats[0]
    assert heartbeat is not None
    heartbeat.beat()
    clock.now += 10
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING
    clock.now += 1
    child.reconcile()
    assert nursery.started[0].signals == ["KILL"]
    assert state_of(child) is ChildState.WAITING
    assert "no heartbeat for 10 s" in child.cause
    clock.now += 1
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING  # its predecessor's silence is not its own


def test_a_child_that_is_not_ready_in_time_counts_as_crashed() -> None:
    nursery, clock, answers = Nursery(), SettableClock(), [False]
    policy = RestartPolicy(start_timeout_s=30.0, max_crashes=2, longest_s=1.0, heartbeat_timeout_s=60.0)
    child = child_of(nursery, clock, policy, is_ready=lambda: all(answers))
    child.reconcile()
    clock.now += 30
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING
    assert not is_ready(child)
    clock.now += 1
    child.reconcile()
    child.reconcile()
    assert child.crashes == 1
    clock.now += 1
    child.reconcile()
    answers[:] = [True]
    child.reconcile()
    assert is_ready(child)
    clock.now += 1000
    child.reconcile()
    assert is_ready(child)


@pytest.mark.parametrize(
    ("beats", "more"),
    [
        pytest.param(False, {"is_ready": lambda: False}, id="never ready"),
        pytest.param(False, {"heartbeats": True}, id="no first heartbeat"),
        pytest.param(True, {"heartbeats": True}, id="frozen after its first heartbeat"),
    ],
)
def test_a_child_that_hangs_at_each_start_is_given_up_at_its_limit(beats: bool, more: dict[str, Any]) -> None:
    nursery, clock = Nursery(), SettableClock()
    policy = RestartPolicy(max_crashes=4, steady_after_s=100.0, start_timeout_s=1000.0, heartbeat_timeout_s=400.0)
    child = child_of(nursery, clock, policy, **more)
    for _ in range(100):
        child.reconcile()
        if beats and child.state is ChildState.RUNNING and not child.ready:
            heartbeat = nursery.heartbeats[-1]
            assert heartbeat is not None
            heartbeat.beat()
        clock.now += 100
    assert (child.state, len(nursery.started)) == (ChildState.GIVEN_UP, 4)


@pytest.mark.parametrize("heartbeats", [False, True])
@pytest.mark.parametrize(("ready_s", "crashes"), [(100, 2), (101, 1)])
def test_only_the_time_that_a_child_was_ready_before_a_crash_ends_the_row_of_crashes(
    heartbeats: bool, ready_s: float, crashes: int
) -> None:
    nursery, clock, answers = Nursery(), SettableClock(), [False]
    child = child_of(nursery, clock, heartbeats=heartbeats, is_ready=lambda: all(answers))
    child.reconcile()
    crash(child, nursery)
    clock.now += 1
    child.reconcile()
    heartbeat = nursery.heartbeats[-1]
    clock.now += 500  # it is slow to start
    answers[:] = [True]
    for passes_s in (0, ready_s):
        clock.now += passes_s
        if heartbeat is not None:
            heartbeat.beat()
        child.reconcile()
    nursery.started[-1].stubborn = True
    crash(child, nursery)
    clock.now += 500  # the kernel is slow to end it
    nursery.started[-1].stubborn = False
    child.reconcile()
    assert child.crashes == crashes


def test_a_child_waits_for_what_it_needs() -> None:
    nursery, clock, there = Nursery(), SettableClock(), False
    child = child_of(nursery, clock, may_start=lambda: there)
    child.reconcile()
    assert state_of(child) is ChildState.WAITING
    there = True
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING


def test_a_stop_is_no_crash_and_kills_only_what_does_not_end_in_time() -> None:
    nursery, clock = Nursery(), SettableClock()
    child = child_of(nursery, clock)
    child.reconcile()
    child.stop("its cluster is gone", within_s=5)
    clock.now += 5
    child.reconcile()
    assert nursery.started[0].signals == ["TERM"]
    clock.now += 1
    child.reconcile()
    assert (child.state, child.crashes) == (ChildState.WAITING, 0)
    child.reconcile()
    assert state_of(child) is ChildState.RUNNING
    child.stop("its job is over", within_s=5, no_restart=True, send_signal=False)
    assert nursery.started[1].signals == []
    nursery.started[1].code = 0
    child.reconcile()
    assert state_of(child) is ChildState.ENDED
    assert child.is_finished
