"""The parent of gunicorn and of the runners: ``rollout-buffer serve``.

It reconciles the job table with running processes, restarts children that died, expires leases and group timeouts, and
owns the local Ray. It stores the task types it has found; servers accept only jobs of these.

The main thread watches children; it never waits for a child or the write lock, and needs no free disk space. A second
thread does all writes to the store, and retries them while the disk is full or broken; meanwhile the service is
read-only.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.observability.liveness import HEARTBEAT_VARIABLE, READY_VARIABLE, Heartbeat
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import SETTINGS_VARIABLE, ServeSettings
from slime_plugins.rollout_buffer.state.recovery import recover
from slime_plugins.rollout_buffer.storage import data_dir, retention
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.storage.write_lock import WriteLockWatch
from slime_plugins.rollout_buffer.supervisor import child_commands
from slime_plugins.rollout_buffer.supervisor.child_processes import (
    ChildProcess,
    ChildRecords,
    ProcessIdentity,
    stop_all,
)
from slime_plugins.rollout_buffer.supervisor.gateway_processes import (
    GATEWAY_NAME,
    STOP_TIMEOUT_S,
    TICK_S,
    GatewayProcesses,
)
from slime_plugins.rollout_buffer.supervisor.generator_discovery import GeneratorDiscovery
from slime_plugins.rollout_buffer.supervisor.listening_sockets import listening_sockets
from slime_plugins.rollout_buffer.supervisor.periodic_tasks import POSTPONED, PeriodicTasks, PeriodicThread
from slime_plugins.rollout_buffer.supervisor.restart_policies import (
    gateway_policy,
    ray_policy,
    runner_policy,
    server_policy,
)
from slime_plugins.rollout_buffer.supervisor.supervised_child import ChildSpec, ChildState, SupervisedChild
from slime_plugins.rollout_buffer.wire.job_settings import EXTERNAL_TASK_TYPE

CLOCK_INTERVAL_S = 0.5
RETENTION_INTERVAL_S = 60.0
WRITE_TIMEOUT_S = 10.0
PORT_TIMEOUT_S = 8.0
"""After a crash: how long to wait until the previous server has released the port."""
ORPHAN_TIMEOUT_S = 15.0
"""After a crash: how long the previous runners and Ray may take to exit. New runners do not wait for them."""
JOB_OVER_TIMEOUT_S = 30.0
RAY_STOP_TIMEOUT_S = 10.0
"""How long the local Ray may take to exit, or a runner whose Ray cluster is gone."""
SERVER_NAME = "server"
EXTERNAL_TASK_TYPES = {EXTERNAL_TASK_TYPE: {"needs_ray": False, "source": "/buffer/write"}}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Runner:
    """The runner of one job, and the arguments it was started with."""

    child: SupervisedChild
    ray_address: str | None = None
    trajectories: int | None = None
    """Number of the job's trajectories when the runner was started."""


@dataclass(slots=True)
class Supervisor:
    """``rollout-buffer serve``. Call ``run()`` once."""

    settings: ServeSettings
    on_ready: Callable[[str], None] | None = None
    _buffer: Buffer = field(init=False)
    _lock: IO[bytes] = field(init=False)
    _heartbeat: Heartbeat = field(init=False, default_factory=Heartbeat)
    _discovery: GeneratorDiscovery = field(init=False)
    _sockets: Sequence[socket.socket] = field(init=False, default=())
    """The server's listening sockets. Each server process inherits them: connections wait while none runs."""
    _server: SupervisedChild = field(init=False)
    _server_ready: Heartbeat = field(init=False, default_factory=Heartbeat)
    _gateway: GatewayProcesses | None = field(init=False, default=None)
    _ray: SupervisedChild | None = field(init=False, default=None)
    _ray_is_wanted: bool = field(init=False, default=False)
    _ray_heartbeat: Heartbeat = field(init=False, default_factory=Heartbeat)
    """The local Ray writes its address here once it is ready."""
    _ray_address: str | None = field(init=False, default=None)
    _jobs: list[JobRecord] = field(init=False, default_factory=list)
    """Jobs that need a runner, from the last successful read."""
    _runners: dict[int, _Runner] = field(init=False, default_factory=dict)
    _to_fail: dict[int, str] = field(init=False, default_factory=dict)
    """Jobs that the writing thread has to fail, with the cause."""
    _tasks: PeriodicTasks = field(init=False)
    _writing: PeriodicThread = field(init=False)
    _write_lock_watch: WriteLockWatch = field(init=False)
    _records: ChildRecords = field(init=False)
    _orphans: list[tuple[ProcessIdentity, float]] = field(init=False, default_factory=list)
    _stored_catalog: dict[str, Any] | None = field(init=False, default=None)
    """The stored task types; servers accept no others."""
    _announced: bool = field(init=False, default=False)
    _stopping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._discovery = GeneratorDiscovery(self.settings.generator_dirs)
        self._write_lock_watch = WriteLockWatch(self.settings.writer_turn_limit_s)
        policy = server_policy(self.settings)
        self._server = SupervisedChild(
            ChildSpec(
                name=SERVER_NAME,
                start=self._start_server,
                policy=policy,
                is_ready=lambda: self._server_ready.last() is not None,
            )
        )
        self._tasks = PeriodicTasks(
            {
                self._beat: SUPERVISOR.beats_every_s / 2,
                self._reconcile_services: 0.0,
                self._read_jobs: 0.0,
                self._reconcile_runners: 0.0,
                self._kill_stuck_lock_owner: CLOCK_INTERVAL_S,
                self._kill_orphans: CLOCK_INTERVAL_S,
                self._record_children: 0.0,
                self._report_ready: 0.0,
            }
        )
        writing = PeriodicTasks(
            {
                self._store_heartbeat: SUPERVISOR.beats_every_s,
                self._discovery.read_file_times: CLOCK_INTERVAL_S,
                self._store_catalog: 0.0,
                self._fail_jobs: 0.0,
                self._keep_reserve: CLOCK_INTERVAL_S,
                self._advance_clock: CLOCK_INTERVAL_S,
                self._purge: RETENTION_INTERVAL_S,
            }
        )
        self._writing = PeriodicThread("store tasks", writing, tick_s=TICK_S)

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then stops every process it started.

        Raises:
            ConfigError: another supervisor has the data directory, or the port is taken.
        """
        was_there = self.settings.data_dir.exists()
        self._lock = data_dir.acquire_ownership(self.settings.data_dir)
        os.umask(0o077)  # also for the children's files
        try:
            self._open()
        except BaseException:
            self._lock.close()
            if not was_there:
                data_dir.remove_unused(self.settings.data_dir)
            raise
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_stop_signal)
        try:
            self._tasks.run(self._buffer.restart_group_clocks)
            self._tasks.run(self._buffer.resume_sessions)
            self._writing.start()
            self._loop()
        finally:
            self._stop_all()

    def _open(self) -> None:
        """Opens the store, once no process of the previous supervisor can write to it."""
        data_dir.restrict_permissions(self.settings.data_dir)
        self._records = ChildRecords(self.settings.data_dir / "children.json")
        timeout_s = PORT_TIMEOUT_S if self._take_over() else 0.0
        ports = [port for port in (self.settings.port, self.settings.gateway_port) if port is not None]
        addresses = [(self.settings.host, port) for port in ports]
        self._sockets, *gateway_sockets = listening_sockets(addresses, timeout_s=timeout_s)
        if self.settings.gateway_port is not None:
            settings = child_commands.gateway_settings(self.settings, self.settings.gateway_port)
            policy = gateway_policy(self.settings.service_heartbeat_timeout_s)
            self._gateway = GatewayProcesses(settings, policy)
            (self._gateway.sockets,) = gateway_sockets
        self._buffer = Buffer(Store(self.settings.data_dir, owned=True))
        self._tasks.run(self._keep_reserve)
        self._tasks.run(self._recover_store)

    def _handle_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _take_over(self) -> bool:
        """After a crash of the previous supervisor: kills its server and gateway; returns True if it left any process.

        Its runners and its Ray got SIGTERM from the kernel and may still exit; ``_kill_orphans`` kills what has not
        exited after ``ORPHAN_TIMEOUT_S``.
        """
        orphans = [identity for identity in self._records.orphans() if identity.members()]
        for identity in orphans:
            logger.warning("found the previous supervisor's %s, process %d, still running", identity.name, identity.pid)
            if identity.name.startswith((SERVER_NAME, GATEWAY_NAME)):
                identity.kill()
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        self._orphans = [(one, deadline) for one in orphans if not one.name.startswith((SERVER_NAME, GATEWAY_NAME))]
        return bool(orphans)

    def _recover_store(self) -> None:
        recover(self._buffer.store)

    def _loop(self) -> None:
        while not self._stopping:
            self._tasks.run_due()
            self._writing.check()
            time.sleep(TICK_S)

    # --- tasks of the main thread: none of them waits ---------------------------------------------------------------

    def _beat(self) -> None:
        """Reports to the servers that this process is alive, and any problem it has."""
        reason = self._writing.tasks.problem() or self._tasks.problem()
        self._heartbeat.beat(starting=self._discovery.activity(), reason=reason)

    def _reconcile_services(self) -> None:
        if self._gateway is not None:
            self._gateway.reconcile()
        self._server.reconcile()
        self._discovery.reconcile()

    def _read_jobs(self) -> None:
        to_fail = set(self._to_fail)  # read before the table, so that a job that is being failed is not restarted
        self._jobs = [job for job in self._buffer.unfinished_jobs() if job.has_runner and job.key not in to_fail]

    def _reconcile_runners(self) -> None:
        if self._discovery.catalog is None:
            return
        self._reconcile_ray(self._jobs)
        for job in self._jobs:
            self._reconcile_runner(job)
        wanted = {job.key for job in self._jobs}
        for key in [key for key in self._runners if key not in wanted]:
            self._release_runner(key)

    def _reconcile_runner(self, job: JobRecord) -> None:
        runner = self._runners.get(job.key)
        if job.task_type not in self._task_types() and (runner is None or runner.child.process is None):
            self._to_fail[job.key] = self._why_unknown(job.task_type)
            return
        # A runner has ended if the job was started again while that runner exited.
        if runner is None or runner.child.state is ChildState.ENDED:
            runner = self._runners[job.key] = _Runner(self._runner_child(job))
        if self._uses_local_ray(job) and runner.ray_address != self._local_ray_address():
            runner.child.stop("the Ray cluster of its devices is gone", within_s=RAY_STOP_TIMEOUT_S)
        runner.child.reconcile()
        if runner.child.state is ChildState.GIVEN_UP:
            times = runner.child.crashes
            self._to_fail[job.key] = f"its runner crashed {times} times in a row: {runner.child.cause}"

    def _why_unknown(self, task_type: str) -> str:
        broken = (self._discovery.catalog or {}).get("broken_generators", {})
        reasons = "".join(f"\n{name} does not load: {reason}" for name, reason in broken.items())
        return f"no generator has task_type {task_type!r} any more{reasons}"[:2000]

    def _release_runner(self, key: int) -> None:
        """Reaps the runner of a job that is over: it exits by itself, and is killed after ``JOB_OVER_TIMEOUT_S``."""
        child = self._runners[key].child
        child.stop("its job is over", within_s=JOB_OVER_TIMEOUT_S, no_restart=True, send_signal=False)
        child.reconcile()
        if child.is_finished:
            del self._runners[key]

    def _kill_stuck_lock_owner(self) -> None:
        """Kills a child that holds the write lock without progress: it would block all writes."""
        owner = self._buffer.store.write_lock_owner()
        if owner is None or not self._write_lock_watch.is_stuck(owner):
            return
        for child in self._children():
            if child.process is not None and owner.pid in child.process.identity.members():
                logger.error("%s, of the %s, without progress: killing it", owner, child.spec.name)
                os.kill(owner.pid, signal.SIGKILL)  # of gunicorn only this worker

    def _kill_orphans(self) -> None:
        """Kills processes of the previous supervisor that have not exited in time."""
        self._orphans = [
            (identity, deadline)
            for identity, deadline in self._orphans
            if identity.members() and (time.monotonic() < deadline or identity.send_kill())
        ]

    def _record_children(self) -> None:
        running = [child.process.identity for child in self._children() if child.process is not None]
        self._records.keep([*running, *(identity for identity, _ in self._orphans)])

    def _children(self) -> Iterator[SupervisedChild]:
        gateway = () if self._gateway is None else self._gateway.children
        children = (self._server, *gateway, *(runner.child for runner in self._runners.values()), self._ray)
        return (child for child in children if child is not None)

    def _report_ready(self) -> None:
        """Calls ``on_ready`` once: when the server answers and the task types are stored, or cannot be, as on a full
        disk."""
        if self._announced or self.on_ready is None or self._discovery.catalog is None:
            return
        accepts = self._stored_catalog is not None or self._writing.tasks.problem() is not None
        if not accepts or not self._server.ready:
            return
        self._announced = True
        self._beat()  # servers refuse jobs as long as the last heartbeat says that generators are being listed
        self.on_ready(self.settings.base_url)

    # --- tasks of the thread that writes ----------------------------------------------------------------------------

    def _store_heartbeat(self) -> None:
        catalog = self._discovery.catalog
        if catalog is not None:
            extended = {**catalog, "task_types": {**catalog["task_types"], **EXTERNAL_TASK_TYPES}}
            self._buffer.beat(SUPERVISOR.name, os.getpid(), extended)
            self._stored_catalog = catalog

    def _store_catalog(self) -> None:
        """Stores a new list of generators at once, without waiting for the next heartbeat."""
        if self._stored_catalog is not self._discovery.catalog:
            self._store_heartbeat()

    def _fail_jobs(self) -> None:
        for key, cause in list(self._to_fail.items()):
            self._buffer.fail_job(key, cause)
            del self._to_fail[key]

    def _keep_reserve(self) -> None:
        self._buffer.store.allocate_reserve()

    def _advance_clock(self) -> None:
        self._buffer.follow_clock()
        self._buffer.expire_leases()
        self._buffer.close_timed_out_groups()
        for job_id in self._buffer.pause_idle_jobs():
            logger.warning("job %s is paused: no trainer polls it", job_id, extra={"job": job_id})
        for job in self._buffer.unfinished_jobs():
            if not job.has_runner and job.has_input:
                self._buffer.finish_if_done(job.key)

    def _purge(self) -> None:
        if self.settings.retain_delivered_s is not None:
            store = self._buffer.store
            retention.purge(store, now=store.clock(), retain_s=self.settings.retain_delivered_s)

    # --- the local Ray -----------------------------------------------------------------------------------------------

    def _reconcile_ray(self, jobs: list[JobRecord]) -> None:
        """Runs a local Ray while a job needs one; if it cannot start, fails the jobs that need it."""
        in_need = [job for job in jobs if self._uses_local_ray(job)]
        if self._ray is None and in_need:
            self._ray = SupervisedChild(
                ChildSpec(
                    name="local Ray",
                    start=self._start_ray,
                    policy=ray_policy(self.settings),
                    may_start=lambda: self._ray_is_wanted,
                    is_ready=self._read_ray_address,
                )
            )
        if self._ray is None:
            return
        self._ray_is_wanted = bool(in_need)
        self._ray.reconcile()
        if self._ray.state is ChildState.GIVEN_UP:
            for job in in_need:
                self._to_fail[job.key] = f"local Ray does not start ({self._ray.crashes} tries): {self._ray.cause}"
            self._ray = None  # the next job that needs Ray retries

    def _uses_local_ray(self, job: JobRecord) -> bool:
        task = self._task_types().get(job.task_type)
        return self.settings.ray_address is None and task is not None and bool(task["needs_ray"])

    def _local_ray_address(self) -> str | None:
        return self._ray_address if self._ray is not None and self._ray.ready else None

    def _read_ray_address(self) -> bool:
        beat = self._ray_heartbeat.last()
        self._ray_address = None if beat is None else beat.detail.get("address")
        return self._ray_address is not None

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_server(self, heartbeat: Heartbeat | None) -> ChildProcess:
        self._server_ready.clear()
        alive, ready = self._heartbeat.descriptor, self._server_ready.descriptor
        listening = [listener.fileno() for listener in self._sockets]
        return ChildProcess(
            SERVER_NAME,
            child_commands.server_command(self.settings, listening),
            log_file=self._log_file(SERVER_NAME),
            environment={
                SETTINGS_VARIABLE: self.settings.model_dump_json(),
                HEARTBEAT_VARIABLE: str(alive),
                READY_VARIABLE: str(ready),
            },
            descriptors=(alive, ready, *listening),
            stop_signal=signal.SIGINT,  # gunicorn would wait for idle connections until its graceful timeout is over
        )

    def _runner_child(self, job: JobRecord) -> SupervisedChild:
        spec = ChildSpec(
            name=f"runner of job {job.job_id}",
            start=partial(self._start_runner, job),
            policy=runner_policy(self.settings),
            heartbeats=True,
            may_start=lambda: not self._uses_local_ray(job) or self._local_ray_address() is not None,
            progressed=lambda: self._has_progressed(job.key),
        )
        return SupervisedChild(spec)

    def _start_runner(self, job: JobRecord, heartbeat: Heartbeat | None) -> ChildProcess:
        assert heartbeat is not None
        runner = self._runners[job.key]
        needs_ray = bool(self._task_types()[job.task_type]["needs_ray"])
        runner.ray_address = (self.settings.ray_address or self._local_ray_address()) if needs_ray else None
        runner.trajectories = self._count_trajectories(job.key)
        command = child_commands.runner_command(
            self.settings,
            job.key,
            heartbeat.descriptor,
            ray_address=runner.ray_address,
            generator_file=self._task_types()[job.task_type].get("source"),
            skip=list(self._discovery.skipped),
        )
        return ChildProcess(
            f"runner of job {job.job_id}",
            command,
            log_file=self.settings.data_dir / data_dir.RUNNER_LOG.format(job.key),
            environment=child_commands.runner_environment(self.settings, needs_ray=needs_ray),
            descriptors=(heartbeat.descriptor,),
        )

    def _has_progressed(self, job_key: int) -> bool:
        """Returns True if a crash does not count against the job: its runner stored a trajectory, or the store cannot
        be written or read."""
        if self._writing.tasks.problem() is not None:
            return True
        now, before = self._count_trajectories(job_key), self._runners[job_key].trajectories
        return now is None or before is None or now > before

    def _count_trajectories(self, job_key: int) -> int | None:
        try:
            return self._buffer.count_trajectories(job_key)
        except POSTPONED as error:
            logger.warning("the trajectories of job %d cannot be counted: %s", job_key, error)
            return None

    def _start_ray(self, _heartbeat: Heartbeat | None) -> ChildProcess:
        self._ray_heartbeat.clear()
        return ChildProcess(
            "local Ray",
            child_commands.local_ray_command(self.settings, self._ray_heartbeat.descriptor),
            log_file=self._log_file("ray"),
            environment=child_commands.local_ray_token(self.settings),
            descriptors=(self._ray_heartbeat.descriptor,),
        )

    def _task_types(self) -> dict[str, Any]:
        """Returns the task types that jobs may name: those of generators, and ``external``."""
        of_generators: dict[str, Any] = {} if self._discovery.catalog is None else self._discovery.catalog["task_types"]
        return {**of_generators, **EXTERNAL_TASK_TYPES}

    def _log_file(self, name: str) -> Path:
        return self.settings.data_dir / "logs" / f"{name}.log"

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Stops server, gateway and runners together, and then Ray, whose devices the runners use.

        It takes less than ``STOP_TIMEOUT_S`` and ``RAY_STOP_TIMEOUT_S`` together, unless a killed process waits in the
        kernel. Waiting polls notice that the supervisor is gone and are answered: the server need not wait for them.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        self._discovery.stop()
        writing_ended = self._writing.stop(WRITE_TIMEOUT_S)
        if writing_ended:
            self._tasks.run(self._remove_heartbeat)
        others = [child.process for child in self._children() if child is not self._ray and child.process is not None]
        stop_all(others, deadline - time.monotonic())
        if self._ray is not None and self._ray.process is not None:
            self._ray.process.stop(RAY_STOP_TIMEOUT_S)
        for identity, _ in self._orphans:
            identity.kill()
        self._records.clear()
        for listener in self._sockets:
            listener.close()
        if self._gateway is not None:
            self._gateway.close()
        if writing_ended:  # otherwise a write still hangs in the thread
            self._buffer.store.close()
        self._lock.close()
        logger.info("stopped")

    def _remove_heartbeat(self) -> None:
        self._buffer.remove_heartbeat(SUPERVISOR.name)
