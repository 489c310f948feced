"""The processes of the gateway, which share its listening sockets.

The parent holds the sockets too: a connection that waits while a process is killed is served by another process or by
its successor.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
from slime_plugins.rollout_buffer.serve_settings import url_of
from slime_plugins.rollout_buffer.storage.data_dir import try_lock
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, ChildRecords, stop_all
from slime_plugins.rollout_buffer.supervisor.listening_sockets import listening_sockets
from slime_plugins.rollout_buffer.supervisor.restart_policies import RestartPolicy, gateway_policy
from slime_plugins.rollout_buffer.supervisor.supervised_child import ChildSpec, SupervisedChild

GATEWAY_NAME = "gateway"
STOP_TIMEOUT_S = 25.0
TICK_S = 0.1

logger = logging.getLogger(__name__)


class GatewayProcesses:
    """Starts and restarts the processes of one gateway. A lock allows one gateway per data directory."""

    def __init__(self, settings: GatewaySettings, policy: RestartPolicy) -> None:
        """Locks the data directory; ``reconcile`` starts the processes once there are ``sockets`` to serve on.

        Raises:
            ConfigError: another gateway has the data directory.
        """
        self._settings = settings
        self._lock = _lock(settings)
        self.sockets: Sequence[socket.socket] = ()
        self.children = [
            SupervisedChild(
                ChildSpec(name=_name(worker), start=partial(self._start, worker), policy=policy, heartbeats=True)
            )
            for worker in range(1, settings.workers + 1)
        ]

    def reconcile(self) -> None:
        """Makes the next step of each process. Never blocks."""
        for child in self.children:
            child.reconcile()

    def close(self) -> None:
        """Closes the sockets and releases the lock; to be called after the processes have ended."""
        for one in self.sockets:
            one.close()
        self._lock.close()

    def _start(self, worker: int, heartbeat: Heartbeat | None) -> ChildProcess:
        assert heartbeat is not None
        descriptors = [heartbeat.descriptor, *(one.fileno() for one in self.sockets)]
        return ChildProcess(
            _name(worker),
            [
                sys.executable, "-m", "slime_plugins.rollout_buffer.gateway.main",
                self._settings.model_dump_json(), str(worker), *map(str, descriptors),
            ],
            log_file=self._settings.data_dir / "logs" / f"{_name(worker).replace(' ', '-')}.log",
            descriptors=descriptors,
        )  # fmt: skip


def serve_gateway(settings: GatewaySettings, on_ready: Callable[[str], None]) -> None:
    """Serves the gateway alone until SIGTERM or SIGINT; calls ``on_ready`` with its URL once it answers.

    Raises:
        ConfigError: another gateway has the data directory, the port is taken, or this version cannot read the data.
    """
    os.umask(0o077)  # also for the children's files
    settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
    store = Store(settings.data_dir)
    processes = GatewayProcesses(settings, gateway_policy(60.0))  # the default of ``serve``
    records = ChildRecords(settings.data_dir / "gateway_children.json")
    for orphan in records.orphans():  # of a parent that was killed
        orphan.kill()
    (processes.sockets,) = listening_sockets([(settings.host, settings.port)], timeout_s=0.0)
    Buffer(store).resume_sessions()
    store.close()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    announced = False
    try:
        while not stopped.wait(TICK_S):
            processes.reconcile()
            records.keep(child.process.identity for child in processes.children if child.process is not None)
            if not announced and any(child.ready for child in processes.children):
                announced = True
                on_ready(url_of(settings.host, processes.sockets[0].getsockname()[1]))
    finally:
        stop_all([child.process for child in processes.children if child.process is not None], STOP_TIMEOUT_S)
        records.clear()
        processes.close()


def _name(worker: int) -> str:
    return GATEWAY_NAME if worker == 1 else f"{GATEWAY_NAME} {worker}"


def _lock(settings: GatewaySettings) -> IO[str]:
    lock = (settings.data_dir / "gateway.lock").open("w", encoding="utf-8")
    if not try_lock(lock.fileno()):
        lock.close()
        raise ConfigError(f"another gateway has {settings.data_dir}: stop it, or send the agents to it")
    return lock
