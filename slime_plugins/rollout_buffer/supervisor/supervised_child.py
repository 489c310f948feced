"""One supervised child: started, watched, stopped and restarted, in steps that never block.

    waiting ──start──▶ running ──exited, or frozen──▶ killed ──session is gone──▶ waiting (backoff)
                          │                                   ▲              │
                          └──stop()──▶ stopping ──too long────┘              └──too many crashes in a row──▶ given up

A parent calls ``reconcile`` of each child in turn, so a child that hangs or cannot be killed delays no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from slime_plugins.rollout_buffer.observability.liveness import Heartbeat, HeartbeatMonitor
from slime_plugins.rollout_buffer.rules.backoff import backoff_s
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.supervisor.restart_policies import RestartPolicy

logger = logging.getLogger(__name__)


class ChildState(StrEnum):
    WAITING = "waiting"  # until its backoff is over and ``may_start``
    RUNNING = "running"
    STOPPING = "stopping"  # may exit until a deadline
    KILLED = "killed"  # until all of its session is gone
    ENDED = "ended"  # stopped with ``no_restart``
    GIVEN_UP = "given up"  # crashed too often in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildSpec:
    """How a child is started and checked; none of the functions may block.

    ``start`` may raise OSError: it is retried without a limit. ``progressed`` returns True if the child did work since
    its start: then its crash is counted as the first in a row.
    """

    name: str
    start: Callable[[Heartbeat | None], ChildProcess]
    policy: RestartPolicy
    heartbeats: bool = False
    may_start: Callable[[], bool] = lambda: True
    is_ready: Callable[[], bool] = lambda: True
    progressed: Callable[[], bool] = lambda: False


class SupervisedChild:
    """One child and its state; the parent calls ``reconcile`` repeatedly."""

    def __init__(self, spec: ChildSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.state = ChildState.WAITING
        self.process: ChildProcess | None = None
        self.crashes = 0
        self.cause = ""
        """Why it exited last, with the end of its log."""
        self._clock = clock
        self._not_before = 0.0
        self._started_at = 0.0
        self._deadline = 0.0
        self._crashed = False
        self._no_restart = False
        self._ready_at: float | None = None
        self._was_steady = False
        self._heartbeat: Heartbeat | None = None
        self._monitor: HeartbeatMonitor | None = None

    @property
    def ready(self) -> bool:
        """Returns True if it runs and has reported ready."""
        return self.state is ChildState.RUNNING and self._ready_at is not None

    @property
    def is_finished(self) -> bool:
        """Returns True if it does not run and will not be restarted."""
        return self.state in (ChildState.ENDED, ChildState.GIVEN_UP)

    def reconcile(self) -> None:
        """Makes the next step: starts, checks, kills or reaps the child. Never blocks."""
        if self.state is ChildState.WAITING:
            self._start_if_due()
        elif self.state is ChildState.RUNNING:
            self._check_running()
        elif self.state is ChildState.STOPPING:
            self._kill_if_late()
        elif self.state is ChildState.KILLED:
            self._reap()

    def stop(self, why: str, *, within_s: float, no_restart: bool = False, send_signal: bool = True) -> None:
        """Gives the child ``within_s`` to exit, then kills it; not counted as a crash.

        It is restarted afterwards, unless ``no_restart``.
        """
        self._no_restart = self._no_restart or no_restart
        if self.state is ChildState.WAITING and no_restart:
            self.state = ChildState.ENDED
        if self.state is not ChildState.RUNNING or self.process is None:
            return
        logger.info("stopping %s: %s", self.spec.name, why)
        self.cause, self._deadline = why, self._clock() + within_s
        self.state = ChildState.STOPPING
        if send_signal:
            self.process.send_stop_signal()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _start_if_due(self) -> None:
        if self._clock() < self._not_before or not self.spec.may_start():
            return
        self._close_heartbeat()
        self._heartbeat = Heartbeat(clock=self._clock) if self.spec.heartbeats else None
        self._started_at, self._ready_at = self._clock(), None
        try:
            self.process = self.spec.start(self._heartbeat)
        except OSError as error:
            logger.error("%s cannot be started: %s", self.spec.name, error)
            self.cause = f"it cannot be started: {error}"
            self._back_off()  # not counted as a crash: retried without a limit
            return
        self._monitor = HeartbeatMonitor(self._heartbeat, self.process.is_stopped, clock=self._clock)
        self.state = ChildState.RUNNING

    def _check_running(self) -> None:
        assert self.process is not None
        assert self._monitor is not None
        heartbeat_timeout_s = self.spec.policy.heartbeat_timeout_s
        if (code := self.process.exit_code()) is not None:
            self._begin_kill(f"it ended with exit code {code}", crashed=True)
        elif self._monitor.is_frozen(heartbeat_timeout_s):
            cause = f"it has sent no heartbeat for {heartbeat_timeout_s:.0f} s: stopped, or its event loop is blocked"
            self._begin_kill(cause, crashed=True)
        elif self._ready_at is None and self.spec.is_ready() and self._has_beaten():
            self._ready_at = self._clock()
        elif self._ready_at is None and self._clock() - self._started_at > self.spec.policy.start_timeout_s:
            self._begin_kill(f"it was not ready within {self.spec.policy.start_timeout_s:.0f} s", crashed=True)

    def _kill_if_late(self) -> None:
        assert self.process is not None
        if self.process.exit_code() is not None:
            self._begin_kill(self.cause, crashed=False)
        elif self._clock() > self._deadline:
            logger.error("%s does not exit: killing it", self.spec.name)
            self._begin_kill(self.cause, crashed=False)

    def _begin_kill(self, why: str, *, crashed: bool) -> None:
        """Starts killing its whole session, whose processes may hold its port or devices."""
        assert self.process is not None
        log_end = self.process.log_tail()
        if crashed:
            self.cause = f"{why}; the end of its log: {log_end}" if log_end else why
            logger.error("%s: %s (%d crashes in a row before):\n%s", self.spec.name, why, self.crashes, log_end)
        self._crashed, self._was_steady = crashed, self._is_steady()
        self.state = ChildState.KILLED
        self._reap()

    def _reap(self) -> None:
        """Kills what is left of the session; once nothing is, sets the next state."""
        assert self.process is not None
        if self.process.identity.send_kill() or self.process.exit_code() is None:
            return
        self.process = None
        self._not_before = self._clock()
        if self._no_restart:
            self.state = ChildState.ENDED
        elif self._crashed:
            self._count_crash()
        else:
            self.state = ChildState.WAITING
        self._close_heartbeat()

    def _count_crash(self) -> None:
        policy = self.spec.policy
        self.crashes = 1 if self._was_steady or self.spec.progressed() else self.crashes + 1
        given_up = policy.max_crashes is not None and self.crashes >= policy.max_crashes
        self.state = ChildState.GIVEN_UP if given_up else ChildState.WAITING
        self._back_off()

    def _back_off(self) -> None:
        policy = self.spec.policy
        pause_s = backoff_s(max(1, self.crashes), first_s=policy.first_s, longest_s=policy.longest_s)
        self._not_before = self._clock() + pause_s

    def _is_steady(self) -> bool:
        """Returns True if it was ready for ``steady_after_s`` before it exited or hung."""
        if self._ready_at is None:
            return False
        beat = None if self._heartbeat is None else self._heartbeat.last()
        hung_s = 0.0 if beat is None else beat.age_s
        return self._clock() - hung_s - self._ready_at > self.spec.policy.steady_after_s

    def _has_beaten(self) -> bool:
        return self._heartbeat is None or self._heartbeat.last() is not None

    def _close_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
