"""The processes of a crash test: one buffer with gateway and Ray, an engine, writers, agents, trainers.

Starts them, finds victims among them, and restarts what nobody else restarts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.disk import SmallDisk
from tests.crash.workload import MARK, Journal, Plan
from tests.held_sockets import HeldSockets
from tests.processes import children_of, processes_with, start_ticks_of

GENERATORS = Path(__file__).with_name("generators")
HEALTHY_WITHIN_S = 90.0
STOP_WITHIN_S = 15.0
HEARTBEAT_TIMEOUT_S = 10.0
TURN_LIMIT_S = 4.0
FREEZES_S = (1.0, 3.0, 6.0, 16.0)
"""How long a process is stopped; only the last is longer than ``HEARTBEAT_TIMEOUT_S``."""
FULL_FOR_S = 6.0


MODULES = {"runner": "runner.main", "gateway": "gateway.main", "ray": "local_ray"}
FREEZABLE = ("supervisor", "master", "worker", "runner", "gateway", "ray", "engine", "writer", "leasing", "checkpoint")


class FleetError(Exception):
    """A process did what it must not: it does not start, or it ended by itself."""


@dataclass(slots=True)
class Crew:
    """A process that the test itself restarts, until it ends with 0; a service never does."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    killed: bool = False
    done: bool = False
    service: bool = False


@dataclass(slots=True)
class Fleet:
    """All processes of one run; every one carries the run's mark in its environment."""

    plan: Plan
    journal: Journal
    port: int
    gateway_port: int
    disk: SmallDisk
    crew: dict[str, Crew] = field(default_factory=dict)
    serve: subprocess.Popen[bytes] | None = None
    start_times_s: list[float] = field(default_factory=list)
    held: HeldSockets | None = None
    """The sockets of ``serve``, if something outside of it holds them; by default it listens itself."""
    _said_before: int = 0
    _started_at: float = 0.0
    _healthy: bool = False
    _killed_serve: bool = False
    _frozen: list[tuple[float, int, int]] = field(default_factory=list)
    _full_until: float = 0.0

    # --- starting ----------------------------------------------------------------------------------------------------

    def start_serve(self) -> None:
        """Starts ``rollout-buffer serve`` on the run's data; ``reconcile`` sees that it becomes healthy."""
        self._said_before = self._times_ready()
        self.serve = self._start("serve", [
            "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(self.port),
            "--data-dir", str(self.plan.path("data")), "--data-root", self.plan.folder,
            "--generator-dir", str(GENERATORS), "--ray-num-cpus", "1",
            "--gateway-port", str(self.gateway_port), "--gateway-workers", str(self.plan.gateway_workers),
            "--runner-heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S),
            "--service-heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S),
            "--writer-turn-limit-s", str(TURN_LIMIT_S),
        ])  # fmt: skip
        self._started_at, self._healthy, self._killed_serve = time.monotonic(), False, False

    def add(self, name: str, *arguments: str, service: bool = False) -> None:
        """Adds a writer, agent, trainer or service, and starts it with the next ``reconcile``."""
        self.crew[name] = Crew(name=name, arguments=["-m", *arguments], service=service)

    def _start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: self.plan.folder, "PYTHONUNBUFFERED": "1"}
        held = self.held if name == "serve" else None
        with self.plan.path(f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*(held.launcher if held else ()), sys.executable, *arguments],
                pass_fds=held.descriptors if held else (),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                cwd=Path(__file__).resolve().parents[2],
            )

    # --- tending -----------------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Restarts what was killed; notes when the buffer is healthy again.

        Raises:
            FleetError: something ended by itself, or the buffer does not become healthy.
        """
        self._tend_serve()
        self._thaw()
        if self.disk.is_full and time.monotonic() > self._full_until:
            self.disk.empty()
            self.journal.note(disk="has room again")
        for crew in self.crew.values():
            self._tend_crew(crew)

    def _tend_serve(self) -> None:
        assert self.serve is not None
        code = self.serve.poll()
        if code is not None:
            if not self._killed_serve:
                raise FleetError(f"serve ended by itself with exit code {code}:\n{self.words('serve')}")
            self.start_serve()
        elif not self._healthy:
            waited = time.monotonic() - self._started_at
            if self._times_ready() > self._said_before:
                self._healthy = True
                self.start_times_s.append(waited)
                self.journal.note(healthy_after_s=round(waited, 2))
            elif waited > HEALTHY_WITHIN_S:
                raise FleetError(f"serve is not healthy after {waited:.0f} s:\n{self.words('serve')}")

    def _times_ready(self) -> int:
        """How often serve said that it serves. On a held port its predecessor may still answer."""
        log = self.plan.path("serve.log")
        return log.read_bytes().count(b"rollout buffer serving on") if log.exists() else 0

    def _tend_crew(self, crew: Crew) -> None:
        if crew.done:
            return
        code = None if crew.process is None else crew.process.poll()
        if crew.process is not None and code is None:
            return
        if code == 0 and not crew.service:
            crew.done = True
        elif crew.process is not None and not crew.killed:
            raise FleetError(f"{crew.name} ended by itself with exit code {code}:\n{self.words(crew.name)}")
        else:
            crew.process, crew.killed = self._start(crew.name, crew.arguments), False

    def tend_until(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Reconciles until ``done``.

        Raises:
            FleetError: it was not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise FleetError(f"{what} did not happen within {timeout_s:.0f} s")
            self.reconcile()
            time.sleep(0.05)

    def tend_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.reconcile()
            time.sleep(0.05)

    @property
    def is_healthy(self) -> bool:
        """The buffer answered since its last start."""
        return self._healthy

    def words(self, name: str) -> str:
        """Returns the last lines of a process's log."""
        path = self.plan.path(f"{name}.log")
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]) if path.exists() else ""

    # --- killing -----------------------------------------------------------------------------------------------------

    def victims(self, kind: str) -> list[tuple[str, int]]:
        """Returns the processes of a kind that live, as (name, id)."""
        if kind == "full disk":
            return [("disk", 0)] if self.disk.is_mounted and not self.disk.is_full else []
        if kind == "everything":
            return self.victims("supervisor")
        if kind == "freeze":
            return [victim for one in FREEZABLE for victim in self.victims(one)]
        if kind in ("writer", "leasing", "checkpoint", "engine", "agent"):
            return [
                (crew.name, crew.process.pid)
                for crew in self.crew.values()
                if crew.name.startswith(kind) and crew.process is not None and crew.process.poll() is None
            ]
        if self.serve is None or self.serve.poll() is not None:
            return []
        if kind in ("supervisor", "frozen runner"):
            return [("serve", self.serve.pid)]
        children = children_of(self.serve.pid)
        if kind in MODULES:
            return [(kind, pid) for pid, command in children.items() if MODULES[kind] in command]
        masters = [pid for pid, command in children.items() if "-m gunicorn" in command]
        if kind == "master":
            return [("master", pid) for pid in masters]
        return [("worker", pid) for master in masters for pid in children_of(master)]

    def kill(self, kind: str, name: str, pid: int, *, length_s: float = 0.0) -> None:
        """Kills a victim at once. For ``frozen runner`` the runner is stopped first, and goes on after its replacement
        has started. ``freeze`` only stops it for a while, ``everything`` kills all that runs at the same moment."""
        if kind == "freeze":
            self._frozen.append((time.monotonic() + length_s, pid, start_ticks_of(pid)))
            os.kill(pid, signal.SIGSTOP)
            return
        if kind == "full disk":
            self.disk.fill()
            self._full_until = time.monotonic() + FULL_FOR_S
            return
        if kind == "everything":
            self._kill_everything()
            return
        if kind == "frozen runner":
            for _, runner in self.victims("runner"):
                # long enough for serve to start again and replace the runner
                self._frozen.append((time.monotonic() + 6.0, runner, start_ticks_of(runner)))
                os.kill(runner, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        if name == "serve":
            assert self.serve is not None
            self._killed_serve = True
            self.serve.wait()
        elif name in self.crew:
            crew = self.crew[name]
            assert crew.process is not None
            crew.killed = True
            crew.process.wait()

    def _kill_everything(self) -> None:
        """Kills as a power cut would, but what was handed to the kernel is still written."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.serve is not None
        self._killed_serve = True
        self.serve.wait()
        for crew in self.crew.values():
            if crew.process is not None and not crew.done:
                crew.killed = True
                crew.process.wait()

    def thaw_all(self) -> None:
        """Lets everything go on that is stopped, and gives the disk its room back: it is calm from now on."""
        self._frozen = [(0.0, pid, started) for _, pid, started in self._frozen]
        self._full_until = 0.0

    def _thaw(self) -> None:
        for entry in [entry for entry in self._frozen if entry[0] < time.monotonic()]:
            _, pid, started = entry
            self._frozen.remove(entry)
            if start_ticks_of(pid) == started:
                self.journal.note(thawed=pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # --- ending ------------------------------------------------------------------------------------------------------

    def stop_services(self) -> None:
        """Ends what the test itself keeps running for the others."""
        for crew in self.crew.values():
            if crew.service and crew.process is not None:
                crew.done = True
                crew.process.kill()
                crew.process.wait()

    def stop_serve(self) -> float:
        """Asks the buffer to stop and returns how many seconds it took until all its processes were gone.

        Raises:
            FleetError: it took too long, or it did not end with 0.
        """
        assert self.serve is not None
        began = time.monotonic()
        self.serve.terminate()
        try:
            code = self.serve.wait(STOP_WITHIN_S + 30)
        except subprocess.TimeoutExpired as error:
            raise FleetError(f"serve does not stop:\n{self.words('serve')}") from error
        took = time.monotonic() - began
        if code != 0 or took > STOP_WITHIN_S:
            raise FleetError(f"serve stopped with exit code {code} after {took:.1f} s:\n{self.words('serve')}")
        return took

    def marked(self) -> dict[int, str]:
        """Returns every process that carries the run's mark, with its command line."""
        return processes_with(f"{MARK}={self.plan.folder}\0")

    def end_everything(self) -> None:
        """Kills every process that carries the run's mark: the last thing of a run, however it went."""
        for pid in self.marked():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in (self.serve, *(crew.process for crew in self.crew.values())):
            if process is not None:
                process.wait()
