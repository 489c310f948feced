"""The parent of gunicorn and of the runners: ``rollout-buffer serve``.

It reconciles the job table with running processes, restarts what died, owns the clock (leases, group timeouts) and the
local Ray. Its heartbeat and the task types it knows are in the store, so that servers accept only work that somebody
will do.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from slime_plugins.rollout_buffer import data_dir, retention
from slime_plugins.rollout_buffer.asgi import SETTINGS_VARIABLE
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.config import ServeSettings, read_token
from slime_plugins.rollout_buffer.errors import ConfigError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.life_signs import Silence
from slime_plugins.rollout_buffer.mending import mend
from slime_plugins.rollout_buffer.payloads import EXTERNAL_TASK_TYPE
from slime_plugins.rollout_buffer.processes import ChildProcess, ChildRecords, ProcessMark
from slime_plugins.rollout_buffer.server import SUPERVISOR
from slime_plugins.rollout_buffer.store import Store
from slime_plugins.rollout_buffer.tables.job_rows import JobRecord

__all__ = ["Supervisor"]

TICK_S = 0.1
HEARTBEAT_INTERVAL_S = 2.0
CLOCK_INTERVAL_S = 0.5
RETENTION_INTERVAL_S = 60.0
SILENCE_INTERVAL_S = 0.5
STOP_PATIENCE_S = 25.0
DISCOVERY_TIMEOUT_S = 120.0
RAY_START_TIMEOUT_S = 300.0
RESTART_BASE_S = 1.0
RESTART_CAP_S = 60.0
MAX_CRASHES = 8
STEADY_AFTER_S = 300.0
"""A runner that lived this long, or brought a trajectory, is not counted as crashing again and again."""
PORT_PATIENCE_S = 8.0
"""After a crash: how long the last server may need to let go of the port."""
LEFTOVER_PATIENCE_S = 15.0
"""After a crash: how long runners and Ray of the last supervisor may need to end. New runners need not wait for it."""
LET_GO_PATIENCE_S = 30.0
SERVER_NAME = "server"
GATEWAY_NAME = "gateway"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _RunnerSlot:
    """The runner of one job: its process, and how often it crashed in a row."""

    process: ChildProcess | None = None
    silence: Silence | None = None
    started_at: float = 0.0
    trajectories: int = 0
    crashes: int = 0
    not_before: float = 0.0
    let_go_at: float | None = None


@dataclass(slots=True)
class Supervisor:
    """Runs until it is told to stop. Build it, then call ``run()`` once."""

    settings: ServeSettings
    on_ready: Callable[[str], None] | None = None
    _buffer: Buffer = field(init=False)
    _lock: data_dir.OwnerLock = field(init=False)
    _runners: dict[int, _RunnerSlot] = field(init=False, default_factory=dict)
    _server: ChildProcess | None = field(init=False, default=None)
    _server_started_at: float = field(init=False, default=0.0)
    _ray: ChildProcess | None = field(init=False, default=None)
    _gateway: ChildProcess | None = field(init=False, default=None)
    _gateway_not_before: float = field(init=False, default=0.0)
    _catalog: dict[str, Any] = field(init=False, default_factory=dict)
    _records: ChildRecords = field(init=False)
    _leftovers: list[tuple[ProcessMark, float]] = field(init=False, default_factory=list)
    _stopping: bool = field(init=False, default=False)

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then ends every process it started.

        Raises:
            ConfigError: another supervisor has the data directory, or the port is taken.
        """
        self._lock = data_dir.own(self.settings.data_dir)
        os.umask(0o077)  # also for the children: what they write is for this user alone
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        try:
            self._catalog = self._discover_generators()
            self._beat()
            self._do(self._buffer.restart_group_clocks)
            self._start_server()
            threading.Thread(target=self._watch_for_silence, name="life signs", daemon=True).start()
            self._loop()
        finally:
            self._stop_all()

    def _open(self) -> None:
        """Opens what the last supervisor left, once nothing of it runs any more that could still write."""
        data_dir.tighten(self.settings.data_dir)
        self._records = ChildRecords(self.settings.data_dir / "children.json")
        self._take_over()
        self._buffer = Buffer(Store(self.settings.data_dir, owned=True))
        self._buffer.store.keep_reserve()
        mend(self._buffer.store)

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _take_over(self) -> None:
        """After a crash of the last supervisor: ends the server it left behind, and has the port free.

        Its runners and its Ray were told by the kernel and may end in order; ``_end_leftovers`` sees that they do.

        Raises:
            ConfigError: the port is taken by somebody else.
        """
        left_behind = [mark for mark in self._records.left_behind() if mark.members()]
        for mark in left_behind:
            logger.warning("the last supervisor left its %s behind, process %d", mark.name, mark.pid)
            if mark.name in (SERVER_NAME, GATEWAY_NAME):
                mark.kill()
        deadline = time.monotonic() + LEFTOVER_PATIENCE_S
        self._leftovers = [(mark, deadline) for mark in left_behind if mark.name not in (SERVER_NAME, GATEWAY_NAME)]
        patience_s = PORT_PATIENCE_S if left_behind else 0.0
        _wait_for_port(self.settings.host, self.settings.port, patience_s)
        if self.settings.gateway_port is not None:
            _wait_for_port(self.settings.host, self.settings.gateway_port, patience_s)

    def _loop(self) -> None:
        every = {
            self._beat: HEARTBEAT_INTERVAL_S,
            self._turn_clock: CLOCK_INTERVAL_S,
            self._forget: RETENTION_INTERVAL_S,
            self._end_leftovers: CLOCK_INTERVAL_S,
            self._watch_server: 0.0,
            self._watch_gateway: 0.0,
            self._reconcile_runners: 0.0,
        }
        due = dict.fromkeys(every, 0.0)
        announced = False
        while not self._stopping:
            for duty, interval in every.items():
                if time.monotonic() >= due[duty]:
                    due[duty] = time.monotonic() + interval
                    self._do(duty)
            if not announced and self.on_ready is not None and _answers(self.settings):
                announced = True
                self.on_ready(self.settings.base_url)
            time.sleep(TICK_S)

    # --- duties ------------------------------------------------------------------------------------------------------

    def _do(self, duty: Callable[[], None]) -> None:
        """Does a duty; a store that is full or busy puts it off, and takes nothing down."""
        try:
            duty()
        except (StorageFullError, UnavailableError) as error:
            logger.error("%s is put off: %s", duty.__name__.strip("_"), error.message)

    def _end_leftovers(self) -> None:
        """Kills what the last supervisor started and what had time enough to end by itself."""
        for entry in list(self._leftovers):
            mark, deadline = entry
            if mark.members() and time.monotonic() < deadline:
                continue
            mark.kill()
            self._leftovers.remove(entry)
            self._record_children()

    def _record_children(self) -> None:
        runners = [slot.process for slot in self._runners.values()]
        others = (self._server, self._gateway, self._ray)
        children = [process for process in (*others, *runners) if process is not None]
        self._records.keep([*(child.mark for child in children), *(mark for mark, _ in self._leftovers)])

    def _beat(self) -> None:
        self._buffer.beat(SUPERVISOR, os.getpid(), self._catalog)

    def _turn_clock(self) -> None:
        self._buffer.store.keep_reserve()
        self._buffer.expire_leases()
        self._buffer.close_timed_out_groups()
        for job_id in self._buffer.pause_idle_jobs():
            logger.warning("job %s is paused: nobody polls it", job_id, extra={"job": job_id})
        for job in self._buffer.unfinished_jobs():
            if not job.has_runner and job.has_input:
                self._buffer.finish_if_done(job.key)

    def _watch_server(self) -> None:
        if self._server is not None and (code := self._server.exit_code()) is not None:
            logger.error("the server ended with exit code %s, starting it again:\n%s", code, self._server.last_words())
            self._server.kill()  # its workers would hold the port for as long as they have requests
            if time.monotonic() - self._server_started_at < RESTART_BASE_S:
                time.sleep(RESTART_BASE_S)
            self._start_server()

    def _watch_gateway(self) -> None:
        """Keeps the gateway running. It starts beside the server, and the server does not wait for it."""
        if self.settings.gateway_port is None or time.monotonic() < self._gateway_not_before:
            return
        if self._gateway is None:
            self._start_gateway(self.settings.gateway_port)
        elif (code := self._gateway.exit_code()) is not None:
            logger.error("the gateway ended with exit code %s, starting it again:\n%s",
                         code, self._gateway.last_words())  # fmt: skip
            self._gateway.kill()
            self._gateway = None
            self._gateway_not_before = time.monotonic() + RESTART_BASE_S

    def _reconcile_runners(self) -> None:
        wanted = {job.key: job for job in self._buffer.unfinished_jobs() if job.has_runner}
        for key, job in wanted.items():
            self._look_after(job, self._runners.setdefault(key, _RunnerSlot()))
        for key in [key for key in self._runners if key not in wanted]:
            self._let_go(key)

    def _look_after(self, job: JobRecord, slot: _RunnerSlot) -> None:
        if slot.process is None:
            if time.monotonic() >= slot.not_before:
                self._start_runner(job, slot)
            return
        code = slot.process.exit_code()
        if code is None:
            return
        lived = time.monotonic() - slot.started_at
        brought = self._buffer.count_trajectories(job.key) - slot.trajectories
        slot.crashes = 1 if lived > STEADY_AFTER_S or brought else slot.crashes + 1
        words = slot.process.last_words()
        slot.process.kill()  # also what it started itself
        slot.process = None
        slot.not_before = time.monotonic() + min(RESTART_CAP_S, RESTART_BASE_S * 2 ** (slot.crashes - 1))
        logger.error("the runner of job %s ended with exit code %s (%d in a row):\n%s",
                     job.job_id, code, slot.crashes, words, extra={"job": job.job_id})  # fmt: skip
        if slot.crashes >= MAX_CRASHES:
            self._buffer.fail_job(job.key, f"its runner ended {slot.crashes} times in a row; the last words: {words}")

    def _watch_for_silence(self) -> None:
        """Kills runners that show no life. A thread of its own: the rest may be waiting for what such a one holds."""
        while not self._stopping:
            for slot in list(self._runners.values()):
                self._end_if_silent(slot)
            time.sleep(SILENCE_INTERVAL_S)

    def _end_if_silent(self, slot: _RunnerSlot) -> None:
        process, patience_s = slot.process, self.settings.runner_patience_s
        if process is None or slot.silence is None or not slot.silence.is_too_long(patience_s):
            return
        slot.silence = None
        logger.error("%s has shown no life for %.0f s (frozen, or its generator blocks the event loop): killing it",
                     process.name, patience_s)  # fmt: skip
        process.kill()  # what follows is as after any crash

    def _let_go(self, key: int) -> None:
        """Its job is over: a runner notices by itself and is only collected here. One that hangs is killed."""
        slot = self._runners[key]
        if slot.let_go_at is None:
            slot.let_go_at = time.monotonic()
        if slot.process is None or slot.process.exit_code() is not None:
            del self._runners[key]
        elif time.monotonic() - slot.let_go_at > LET_GO_PATIENCE_S:
            logger.error("%s does not end after its job: killing it", slot.process.name)
            slot.process.kill()

    def _forget(self) -> None:
        if self.settings.retain_delivered_s is not None:
            retention.forget(self._buffer.store, now=time.time(), retain_s=self.settings.retain_delivered_s)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _discover_generators(self) -> dict[str, Any]:
        """Asks a short-lived process which generators there are: a bad file must not take the supervisor along."""
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer.generator"]
        command += [str(folder) for folder in self.settings.generator_dirs]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=DISCOVERY_TIMEOUT_S, check=True)
            catalog: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            words = getattr(error, "stderr", "") or ""
            raise ConfigError(f"the generators cannot be listed: {error}\n{words[-2000:]}") from error
        for name, reason in catalog["broken_generators"].items():
            logger.error("generator file %s does not load:\n%s", name, reason)
        catalog["task_types"][EXTERNAL_TASK_TYPE] = {"needs_ray": False, "source": "/buffer/write"}
        logger.info("task types: %s", ", ".join(sorted(catalog["task_types"])))
        return catalog

    def _start_server(self) -> None:
        settings_file = self.settings.data_dir / "serve_settings.json"
        settings_file.write_text(self.settings.model_dump_json(), encoding="utf-8")
        command = [
            sys.executable, "-m", "gunicorn", "slime_plugins.rollout_buffer.asgi:create_application_from_environment()",
            "--bind", f"{self.settings.host}:{self.settings.port}",
            "--worker-class", "slime_plugins.rollout_buffer.asgi_worker.Worker",
            "--workers", str(self.settings.workers),
            "--timeout", "120", "--graceful-timeout", "5",
            "--error-logfile", "-", "--no-control-socket",
            "--logger-class", "slime_plugins.rollout_buffer.asgi_worker.Logger",
        ]  # fmt: skip
        environment = {SETTINGS_VARIABLE: str(settings_file.resolve())}
        self._server_started_at = time.monotonic()
        self._server = ChildProcess(SERVER_NAME, command, log_file=self._log_file(SERVER_NAME), environment=environment)
        self._record_children()

    def _start_gateway(self, port: int) -> None:
        settings_file = self.settings.data_dir.resolve() / "gateway_settings.json"
        settings = GatewaySettings(
            data_dir=self.settings.data_dir.resolve(),
            host=self.settings.host,
            port=port,
            token_file=None if self.settings.token_file is None else self.settings.token_file.resolve(),
            scoring_hosts=self.settings.scoring_hosts,
            max_body_bytes=self.settings.max_body_bytes,
            max_data_bytes=self.settings.max_data_bytes,
        )
        settings_file.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer.gateway.main", str(settings_file)]
        self._gateway = ChildProcess(GATEWAY_NAME, command, log_file=self._log_file(GATEWAY_NAME))
        self._record_children()

    def _start_runner(self, job: JobRecord, slot: _RunnerSlot) -> None:
        task = self._catalog["task_types"].get(job.task_type)
        if task is None:
            self._buffer.fail_job(job.key, f"no generator has task_type {job.task_type!r} any more")
            return
        command = [
            sys.executable, "-m", "slime_plugins.rollout_buffer.runner_main",
            "--data-dir", str(self.settings.data_dir.resolve()), "--job-key", str(job.key),
            "--buffer-url", self.settings.base_url,
        ]  # fmt: skip
        for folder in self.settings.generator_dirs:
            command += ["--generator-dir", str(folder)]
        if self.settings.max_data_bytes is not None:
            command += ["--max-data-bytes", str(self.settings.max_data_bytes)]
        try:
            environment = self._own_token()
            if task["needs_ray"]:
                environment |= self._local_ray_token()
                command += ["--ray-address", self._ray_address()]
        except ConfigError as error:
            self._buffer.fail_job(job.key, error.message)
            return
        life_sign = self.settings.data_dir.resolve() / "life_signs" / f"runner-{job.key}"
        life_sign.parent.mkdir(exist_ok=True)
        command += ["--life-sign", str(life_sign)]
        log_file = self._log_file(f"runner-{job.key}")
        slot.silence = Silence(life_sign)
        slot.process = ChildProcess(f"runner of job {job.job_id}", command, log_file=log_file, environment=environment)
        slot.started_at, slot.let_go_at = time.monotonic(), None
        slot.trajectories = self._buffer.count_trajectories(job.key)
        self._record_children()

    def _own_token(self) -> dict[str, str]:
        """Returns what generators in the plain form write to this buffer with: they are its clients."""
        if self.settings.token_file is None:
            return {}
        return {"ROLLOUT_BUFFER_TOKEN": read_token(self.settings.token_file)}

    def _ray_address(self) -> str:
        """Returns the cluster with the devices; starts a local one when none was named and it does not run yet."""
        if self.settings.ray_address is not None:
            return self.settings.ray_address
        address_file = self.settings.data_dir / "ray_address"
        if self._ray is None or self._ray.exit_code() is not None:
            address_file.unlink(missing_ok=True)
            command = [sys.executable, "-m", "slime_plugins.rollout_buffer.generator.android_world.local_ray"]
            command += ["--address-file", str(address_file.resolve())]
            if self.settings.ray_num_cpus is not None:
                command += ["--num-cpus", str(self.settings.ray_num_cpus)]
            environment = self._local_ray_token()
            self._ray = ChildProcess("local Ray", command, log_file=self._log_file("ray"), environment=environment)
            self._record_children()
        deadline = time.monotonic() + RAY_START_TIMEOUT_S
        while time.monotonic() < deadline and not self._stopping and self._ray.exit_code() is None:
            if address_file.exists() and (address := address_file.read_text(encoding="utf-8").strip()):
                return address
            time.sleep(TICK_S)
            self._beat_if_due()
        raise ConfigError(f"local Ray does not start: {self._ray.last_words() or 'no word from it'}")

    def _local_ray_token(self) -> dict[str, str]:
        """Returns the environment that guards the local Ray with a token of its own: Ray listens on every interface.

        A cluster that somebody else runs (``--ray-address``) has its own guard: its settings come from our environment.
        """
        if self.settings.ray_address is not None:
            return {}
        path = self.settings.data_dir.resolve() / "ray_token"
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}

    def _beat_if_due(self) -> None:
        beat = self._buffer.heartbeat(SUPERVISOR)
        if beat is None or beat[0] > HEARTBEAT_INTERVAL_S:
            self._beat()

    def _log_file(self, name: str) -> Path:
        return self.settings.data_dir / "logs" / f"{name}.log"

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Server first, so that nothing new comes in; then the runners, which give up their attempts; Ray last.

        Waiting polls see that the supervisor is gone and answer: the server need not wait for them.
        """
        self._do(self._say_goodbye)
        runners = [slot.process for slot in self._runners.values() if slot.process is not None]
        for process in (self._server, self._gateway, *runners):
            if process is not None:
                process.ask_to_stop()
        for process in (self._server, self._gateway, *runners, self._ray):
            if process is not None:
                process.stop(STOP_PATIENCE_S)
        for mark, _ in self._leftovers:
            mark.kill()
        self._records.forget()
        self._buffer.store.close()
        self._lock.close()
        logger.info("stopped")

    def _say_goodbye(self) -> None:
        self._buffer.forget(SUPERVISOR)


def _wait_for_port(host: str, port: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while (taken := _why_taken(host, port)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigError(f"cannot serve on {host}:{port}: {taken}; give another --port (or --gateway-port)")
        time.sleep(TICK_S)


def _why_taken(host: str, port: int) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _answers(settings: ServeSettings) -> bool:
    try:
        with socket.create_connection((settings.base_url.split("//")[1].rsplit(":", 1)[0], settings.port), timeout=1):
            return True
    except OSError:
        return False
